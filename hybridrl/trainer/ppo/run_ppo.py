"""The PPO program, from the configuration to the last step."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from hybridrl.config import PPOTrainerConfig
from hybridrl.registry import import_external_lib
from hybridrl.single_controller.ray import RayWorkerGroup
from hybridrl.trainer.ppo.roles import resource_pools, spawn_worker_groups
from hybridrl.trainer.startup import workers_starting


def run_ppo(config: PPOTrainerConfig, role_worker_mapping: Mapping[str, Any] | None = None) -> None:
    """Train as `config` says.

    Args:
        role_worker_mapping: worker classes by role, in place of the library's classes.
    """
    import_external_lib(config.actor_rollout_ref.model.external_lib)  # may register roles; their workers start first
    manager = resource_pools(config)

    def spawn() -> dict[str, RayWorkerGroup]:
        return spawn_worker_groups(config, role_worker_mapping, manager)

    with workers_starting(config.ray_kwargs.ray_init, manager, config.trainer.device, spawn) as started:
        from hybridrl.trainer.ppo.build import prepare  # takes seconds (transformers, datasets), as Ray's start does

        trainer = prepare(config, role_worker_mapping, manager)
        with closing(trainer.reward_fn):
            trainer.init_workers(started())
            with closing(trainer.rollout):
                trainer.fit()
