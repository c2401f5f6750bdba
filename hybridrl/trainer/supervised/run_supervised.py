"""The programs of supervised training (`sft`, `dpo`, `kto`, `rm`), from the configuration to the last step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hybridrl.config import SupervisedConfig, validate
from hybridrl.errors import WorkerUserError
from hybridrl.notify import notify
from hybridrl.programs import ProgramResult
from hybridrl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager
from hybridrl.trainer.hub_upload import open_repository, upload_result
from hybridrl.trainer.own_folder import settle_folder
from hybridrl.trainer.startup import USES_GPU, depends_on_model, workers_starting

if TYPE_CHECKING:
    from hybridrl.trainer.supervised.supervised_trainer import SupervisedTrainer

ROLE = "model"


def run_supervised(config: SupervisedConfig) -> ProgramResult:
    """Train as `config` says. Where one of several ranks runs out of memory, see `hybridrl.trainer.repeating`.

    Raises:
        ConfigError: `validate` finds faults in the configuration.
    """
    validate(config)
    open_repository(config.trainer.hub)
    result = _fit(config)
    from hybridrl.trainer.supervised.supervised_trainer import MODEL_FOLDER  # takes seconds (torch)

    upload_result(config.trainer.hub, result, MODEL_FOLDER)
    return result


def _fit(config: SupervisedConfig) -> ProgramResult:
    while True:
        with _started_trainer(config) as trainer:
            try:
                trainer.fit()
                return trainer.run.outcome
            except WorkerUserError as error:
                from hybridrl.trainer.repeating import settings_to_repeat

                longest = config.data.max_length * trainer.objective.rows_together
                config = settings_to_repeat(config, longest, trainer.run, error)


@contextmanager
def _started_trainer(config: SupervisedConfig) -> Iterator["SupervisedTrainer"]:
    """Start everything that `fit` needs; the workers end with the block."""
    validate(config)
    if depends_on_model(config):
        from hybridrl.trainer.supervised.prepare_supervised import check_training_engine

        check_training_engine(config)
    settle_folder(config)
    placement, trainer_config = config.placement, config.trainer
    pool = placement.roles[ROLE]
    manager = ResourcePoolManager(
        {pool: list(placement.pools[pool])}, mapping={ROLE: pool}, use_gpu=USES_GPU[trainer_config.device]
    )

    def spawn() -> RayWorkerGroup:
        from hybridrl.workers.supervised_worker import (
            SupervisedWorker,
        )  # takes seconds (transformers); Ray already runs

        manager.create_resource_pool()
        return RayWorkerGroup(
            resource_pool=manager.get_resource_pool(ROLE),
            ray_cls_with_init=RayClassWithInitArgs(cls=SupervisedWorker, config=config),
            ray_wait_register_center_timeout=trainer_config.ray_wait_register_center_timeout,
            timeout_s=trainer_config.phase_timeout_s,
            threads=trainer_config.threads_per_worker,
        )

    with workers_starting(config.ray_kwargs, manager, trainer_config.device, spawn) as started:
        from hybridrl.trainer.memory_peaks import check_memory
        from hybridrl.trainer.supervised.prepare_supervised import prepare  # takes seconds, as Ray's start does

        trainer = prepare(config)
        notify(f"{trainer.sizes()}; loading the model {config.model.path}")
        group = started()
        trainer.init_workers(group, check_memory(config, group))
        yield trainer
