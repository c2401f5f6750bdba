"""Reads and checks tokenizer and data before a model is loaded, while Ray and the worker processes start."""

from hybridrl.config import PairsDataConfig, SupervisedConfig
from hybridrl.config.entry_settings import engine_settings
from hybridrl.data import create_preference_dataset, create_sft_dataset
from hybridrl.errors import ModelError
from hybridrl.models.info import checked_identity, tokenizer_of
from hybridrl.models.model_config import config_of
from hybridrl.models.rope import check_length
from hybridrl.models.value import check_reward_model
from hybridrl.models.vision import is_vision_model, processor_of
from hybridrl.notify import notify
from hybridrl.observe.tracking import check_loggers
from hybridrl.trainer.startup import check_engine
from hybridrl.trainer.supervised.supervised_trainer import SupervisedTrainer
from hybridrl.workers.objectives import Objective


def check_training_engine(config: SupervisedConfig) -> None:
    """Refuse settings of the training engine that do not fit the model."""
    ranks = sum(config.placement.pools[config.placement.roles["model"]])
    check_engine("engine", config.engine, config.model, ranks, config.optim, config.checkpoint)


def prepare(config: SupervisedConfig) -> SupervisedTrainer:
    """Build the trainer, with everything that lives on the controller.

    Raises:
        UserError: a setting or file cannot work. No model has been loaded yet.
    """
    data = config.data
    check_loggers(config.trainer.logger)
    tokenizer = tokenizer_of(config.model)
    identity = checked_identity(config.model, tokenizer)
    check_training_engine(config)
    check_length(config_of(config.model), data.max_length, f"model.path={config.model.path} with data.max_length")
    engine_settings(config.engine, config.model.external_lib)  # registers the objectives of external_lib
    if Objective(config.objective.loss_type, config.objective).output == "values":
        if is_vision_model(config_of(config.model)):
            raise ModelError(
                f"model.path={config.model.path} is a vision-language model, and reward models of images are not "
                "built; use a model that reads text"
            )
        check_reward_model(config_of(config.model))
        _warn_of_padding(tokenizer)
    processor = processor_of(config.model, data.mm_processor_kwargs)
    create = create_preference_dataset if isinstance(data, PairsDataConfig) else create_sft_dataset
    train = create(
        data.train_files,
        data,  # type: ignore[arg-type]
        tokenizer,
        data.train_max_samples,
        key="data.train_files",
        processor=processor,
    )
    val = None
    if data.val_files:
        val = create(
            data.val_files,
            data,  # type: ignore[arg-type]
            tokenizer,
            data.val_max_samples,
            key="data.val_files",
            processor=processor,
        )
    trainer = SupervisedTrainer(config, train_dataset=train, val_dataset=val, identity=identity)
    trainer.run.look_for_checkpoint()
    return trainer


def _warn_of_padding(tokenizer: object) -> None:
    """Warn if sequences end in the token that they are padded with, which transformers would take for padding."""
    pad, eos = getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None)
    if pad is None or pad == eos:
        notify(
            "the tokenizer pads with its EOS token: transformers' AutoModelForSequenceClassification looks for the "
            "last token that is not padding, and would score the one before EOS; hybridrl scores EOS. Give the "
            "tokenizer a pad token of its own before training (tokenizer.add_special_tokens), or score with hybridrl",
            "warning",
        )
