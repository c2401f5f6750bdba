"""The supervised program, from a configuration to the last step.

Tokenizer and data are read and checked while Ray and the worker processes start in a thread beside it; no model is
loaded before they are well.
"""

from concurrent.futures import ThreadPoolExecutor

from hybridrl.config import SFTTrainerConfig
from hybridrl.data import create_sft_dataset
from hybridrl.models import load_model_config, load_tokenizer, model_identity
from hybridrl.single_controller.ray import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePoolManager,
    init_ray,
    shutdown_ray,
)
from hybridrl.trainer.sft.trainer import SFTTrainer
from hybridrl.workers.sft_worker import SFTWorker

ROLE = "model"


def run_sft(config: SFTTrainerConfig) -> None:
    """Train as `config` says."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="start-workers") as background:
        try:
            starting = background.submit(start_workers, config)
            trainer = prepare(config)
            trainer.init_workers(starting.result())
            trainer.fit()
        finally:
            starting.cancel()
            shutdown_ray()


def start_workers(config: SFTTrainerConfig) -> RayWorkerGroup:
    """Ray and the worker processes; they hold no model yet."""
    placement, trainer = config.placement, config.trainer
    pool = placement.roles[ROLE]
    manager = ResourcePoolManager(resource_pool_spec={pool: list(placement.pools[pool])}, mapping={ROLE: pool})
    init_ray(config.ray_kwargs.ray_init, manager.resource_pool_spec)
    manager.create_resource_pool()
    return RayWorkerGroup(
        resource_pool=manager.get_resource_pool(ROLE),
        ray_cls_with_init=RayClassWithInitArgs(cls=SFTWorker, config=config),
        name_prefix=ROLE,
        ray_wait_register_center_timeout=trainer.ray_wait_register_center_timeout,
        timeout_s=trainer.phase_timeout_s,
        threads=trainer.threads_per_worker,
    )


def prepare(config: SFTTrainerConfig) -> SFTTrainer:
    """The trainer with everything that lives on the controller.

    Raises:
        UserError: a setting or file of the user's cannot work; nothing was loaded yet.
    """
    data = config.data
    tokenizer = load_tokenizer(config.model)
    train = create_sft_dataset(data.train_files, data, tokenizer, data.train_max_samples, key="data.train_files")
    val = None
    if data.val_files:
        val = create_sft_dataset(data.val_files, data, tokenizer, data.val_max_samples, key="data.val_files")
    identity = model_identity(load_model_config(config.model), tokenizer)
    return SFTTrainer(config, train_dataset=train, val_dataset=val, identity=identity)
