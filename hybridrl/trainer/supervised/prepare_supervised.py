"""Reads and checks tokenizer and data before a model is loaded, while Ray and the worker processes start."""

from collections.abc import Callable
from functools import partial
from typing import Any

from hybridrl.config import LabelledDataConfig, PairsDataConfig, SupervisedConfig
from hybridrl.config.entry_settings import engine_settings
from hybridrl.data import create_labelled_dataset, create_preference_dataset, create_sft_dataset
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


def check_training_engine(config: SupervisedConfig, *, weights: bool = True) -> None:
    """Refuse settings of the training engine that do not fit the model.

    Args:
        weights: whether the files of its weights are on this machine.
    """
    ranks = sum(config.placement.pools[config.placement.roles["model"]])
    check_engine("engine", config.engine, config.model, ranks, config.optim, config.checkpoint, weights=weights)


def prepare(config: SupervisedConfig) -> SupervisedTrainer:
    """Build the trainer, with everything that lives on the controller.

    Raises:
        UserError: a setting or file cannot work. No model has been loaded yet.
    """
    check_loggers(config.trainer.logger)
    tokenizer = tokenizer_of(config.model)
    for check in checks_of_model(config, tokenizer):
        check()
    trainer = trainer_of(config, tokenizer, read_data(config, tokenizer))
    trainer.run.look_for_checkpoint()
    return trainer


def checks_of_model(
    config: SupervisedConfig, tokenizer: Any, *, weights: bool = True
) -> tuple[Callable[[], object], ...]:
    """Return the checks of settings against the model; each raises a `UserError`, whatever the others do.

    Args:
        weights: whether the files of its weights are on this machine.
    """
    subject = f"model.path={config.model.path} with data.max_length"
    return (
        partial(checked_identity, config.model, tokenizer),
        partial(check_training_engine, config, weights=weights),
        lambda: check_length(config_of(config.model), config.data.max_length, subject),
        partial(_check_objective, config, tokenizer),
    )


def _check_objective(config: SupervisedConfig, tokenizer: object) -> None:
    """Refuse models that the objective cannot train."""
    engine_settings(config.engine, config.model.external_lib)  # registers the objectives of external_lib
    objective = Objective(config.objective.loss_type, config.objective)
    if objective.metadata.kl_baseline and is_vision_model(config_of(config.model)):
        raise ModelError(
            f"model.path={config.model.path} is a vision-language model, and the KL baseline of "
            f"{config.objective_group}.loss_type={objective.name} is not built for prompts with images; use "
            f"{config.objective_group}.loss_type=apo_zero_unpaired, or a model that reads text"
        )
    if objective.output == "values":
        if is_vision_model(config_of(config.model)):
            raise ModelError(
                f"model.path={config.model.path} is a vision-language model, and reward models of images are not "
                "built; use a model that reads text"
            )
        check_reward_model(config_of(config.model))
        _warn_of_padding(tokenizer)


def read_data(config: SupervisedConfig, tokenizer: Any, rows: int | None = None) -> tuple[Any, Any]:
    """Return the training data and those of validation; the latter are None if there are none.

    Args:
        rows: at most so many rows of either; None: as the settings say.
    """
    data = config.data
    processor = processor_of(config.model, data.mm_processor_kwargs)
    create: Any = create_sft_dataset
    if isinstance(data, PairsDataConfig):
        create = create_preference_dataset
    elif isinstance(data, LabelledDataConfig):
        create = create_labelled_dataset

    def read(files: list[str], most: int, key: str) -> Any:
        count = most if rows is None else rows if most < 0 else min(rows, most)
        return create(files, data, tokenizer, count, key=key, processor=processor)

    train = read(data.train_files, data.train_max_samples, "data.train_files")
    return train, read(data.val_files, data.val_max_samples, "data.val_files") if data.val_files else None


def trainer_of(config: SupervisedConfig, tokenizer: Any, data: tuple[Any, Any]) -> SupervisedTrainer:
    """Return the trainer of these data, see `read_data`."""
    train, val = data
    identity = checked_identity(config.model, tokenizer)
    return SupervisedTrainer(config, train_dataset=train, val_dataset=val, identity=identity)


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
