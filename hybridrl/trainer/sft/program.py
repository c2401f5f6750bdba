"""The supervised program, from a configuration to the last step.

Tokenizer and data are read and checked while Ray and the worker processes start beside it; no model is loaded before
they are well.
"""

from hybridrl.config import SFTTrainerConfig
from hybridrl.data import create_sft_dataset
from hybridrl.models.facts import checked_identity, tokenizer_of
from hybridrl.observe.tracking import check_loggers
from hybridrl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager
from hybridrl.trainer.sft.trainer import SFTTrainer
from hybridrl.trainer.start import USES_GPU, workers_starting
from hybridrl.workers.sft_worker import SFTWorker

ROLE = "model"


def run_sft(config: SFTTrainerConfig) -> None:
    """Train as `config` says."""
    placement, trainer_config = config.placement, config.trainer
    pool = placement.roles[ROLE]
    manager = ResourcePoolManager(
        {pool: list(placement.pools[pool])}, mapping={ROLE: pool}, use_gpu=USES_GPU[trainer_config.device]
    )

    def spawn() -> RayWorkerGroup:
        manager.create_resource_pool()
        return RayWorkerGroup(
            resource_pool=manager.get_resource_pool(ROLE),
            ray_cls_with_init=RayClassWithInitArgs(cls=SFTWorker, config=config),
            ray_wait_register_center_timeout=trainer_config.ray_wait_register_center_timeout,
            timeout_s=trainer_config.phase_timeout_s,
            threads=trainer_config.threads_per_worker,
        )

    with workers_starting(config.ray_kwargs.ray_init, manager, trainer_config.device, spawn) as started:
        trainer = prepare(config)
        trainer.init_workers(started())
        trainer.fit()


def prepare(config: SFTTrainerConfig) -> SFTTrainer:
    """The trainer with everything that lives on the controller.

    Raises:
        UserError: a setting or file of the user's cannot work; nothing was loaded yet.
    """
    data = config.data
    check_loggers(config.trainer.logger)
    tokenizer = tokenizer_of(config.model)
    identity = checked_identity(config.model, tokenizer)
    train = create_sft_dataset(data.train_files, data, tokenizer, data.train_max_samples, key="data.train_files")
    val = None
    if data.val_files:
        val = create_sft_dataset(data.val_files, data, tokenizer, data.val_max_samples, key="data.val_files")
    trainer = SFTTrainer(config, train_dataset=train, val_dataset=val, identity=identity)
    trainer.run.look_for_checkpoint()
    return trainer
