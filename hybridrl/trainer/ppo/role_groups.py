"""The pools and worker groups of the roles of a run; `hybridrl.config.roles` is the table of roles."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from hybridrl.config import PPOTrainerConfig
from hybridrl.config.roles import POLICY as POLICY
from hybridrl.config.roles import ROLES as ROLES
from hybridrl.config.roles import MicroBatches as MicroBatches
from hybridrl.config.roles import Pass as Pass
from hybridrl.config.roles import RoleSpec as RoleSpec
from hybridrl.config.roles import Scoring as Scoring
from hybridrl.config.roles import Update as Update
from hybridrl.config.roles import active_roles as active_roles
from hybridrl.config.roles import pool_of, pools_of
from hybridrl.config.roles import register_role as register_role
from hybridrl.errors import ConfigError
from hybridrl.single_controller.ray import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)
from hybridrl.trainer.startup import USES_GPU

#: key in the pool mapping, and name of the pool, for replicas on their own devices
ROLLOUT, ROLLOUT_POOL = "rollout", "rollout_pool"


class Role(StrEnum):
    """verl's names of the roles. Each is the string that names the role everywhere."""

    Actor = "actor"
    Rollout = ROLLOUT
    ActorRollout = POLICY
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "reward_model"
    ActorRolloutRef = "actor_rollout_ref"


def resource_pools(config: PPOTrainerConfig) -> ResourcePoolManager:
    """Return the pools of the run, and the pool of each active role.

    Raises:
        ConfigError: a role has no pool.
    """
    mapping = {}
    for spec in active_roles(config):
        pool = pool_of(spec, config)
        if pool is None:
            raise ConfigError(
                f"placement.roles.{spec.placement[0]} is missing; name the pool in which {spec.name} runs"
            )
        mapping[spec.name] = pool
    pools = pools_of(config)
    used = {name: list(pools[name]) for name in dict.fromkeys(mapping.values())}
    rollout = config.actor_rollout_ref.rollout
    if rollout.nnodes:
        mapping[ROLLOUT] = ROLLOUT_POOL
        used[ROLLOUT_POOL] = [rollout.n_gpus_per_node] * rollout.nnodes
    return ResourcePoolManager(resource_pool_spec=used, mapping=mapping, use_gpu=USES_GPU[config.trainer.device])


def spawn_worker_groups(
    config: PPOTrainerConfig,
    role_worker_mapping: Mapping[str, Any] | None = None,
    manager: ResourcePoolManager | None = None,
    ray_worker_group_cls: type[RayWorkerGroup] = RayWorkerGroup,
) -> dict[str, RayWorkerGroup]:
    """Start the processes. Roles of one pool share its processes and take turns. Each role is called through its own
    worker group. A role that inference engines serve gets a `ServedRole`, whose replicas start with `init_model`.

    Args:
        config: says which roles take part and, if `manager` is None, in which pools they run.
        role_worker_mapping: worker classes by role, in place of those in the table.
    """
    workers = role_worker_mapping or {}
    manager = manager or resource_pools(config)
    manager.create_resource_pool()
    trainer, timeout_s = config.trainer, config.actor_rollout_ref.nccl_timeout
    by_pool: dict[str, list[RoleSpec]] = {}
    served = [spec for spec in active_roles(config) if spec.name not in workers and spec.served(config)]
    for spec in active_roles(config):
        if spec not in served:
            by_pool.setdefault(manager.mapping[spec.name], []).append(spec)
    groups: dict[str, RayWorkerGroup] = {}
    for specs in by_pool.values():
        classes = {
            spec.name: RayClassWithInitArgs(
                cls=workers.get(spec.name) or spec.worker(),
                config=spec.config_of(config),
                timeout_s=timeout_s,
                **spec.arguments,
            )
            for spec in specs
            if spec.worker is not None
        }
        fused = ray_worker_group_cls(
            resource_pool=manager.get_resource_pool(specs[0].name),
            ray_cls_with_init=create_colocated_worker_cls(classes),
            ray_wait_register_center_timeout=trainer.ray_wait_register_center_timeout,
            timeout_s=trainer.phase_timeout_s,
            threads=trainer.threads_per_worker,
        )
        groups |= fused.spawn(prefix_set=classes.keys())
    for spec in served:
        assert spec.server is not None
        groups[spec.name] = spec.server()(
            spec.name,
            spec.served(config),
            manager.get_resource_pool(spec.name),
            shared=list(manager.mapping.values()).count(manager.mapping[spec.name]) > 1,
            threads=trainer.threads_per_worker,
            log_folder=Path(trainer.default_local_dir) / "logs",
        )
    return groups
