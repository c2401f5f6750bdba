"""Reads and checks tokenizer and data before a model is loaded, while Ray and the worker processes start."""

from hybridrl.config import SFTTrainerConfig
from hybridrl.data import create_sft_dataset
from hybridrl.models.info import checked_identity, tokenizer_of
from hybridrl.observe.tracking import check_loggers
from hybridrl.trainer.startup import check_engine
from hybridrl.trainer.supervised.trainer import SupervisedTrainer


def prepare(config: SFTTrainerConfig) -> SupervisedTrainer:
    """Build the trainer, with everything that lives on the controller.

    Raises:
        UserError: a setting or file cannot work. No model has been loaded yet.
    """
    data = config.data
    check_loggers(config.trainer.logger)
    tokenizer = tokenizer_of(config.model)
    identity = checked_identity(config.model, tokenizer)
    ranks = sum(config.placement.pools[config.placement.roles["model"]])
    check_engine("engine", config.engine, config.model, ranks, config.optim, config.checkpoint)
    train = create_sft_dataset(data.train_files, data, tokenizer, data.train_max_samples, key="data.train_files")
    val = None
    if data.val_files:
        val = create_sft_dataset(data.val_files, data, tokenizer, data.val_max_samples, key="data.val_files")
    trainer = SupervisedTrainer(config, train_dataset=train, val_dataset=val, identity=identity)
    trainer.run.look_for_checkpoint()
    return trainer
