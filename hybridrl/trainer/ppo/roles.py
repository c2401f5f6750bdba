"""Which models take part, on which pool of devices each lives, and the worker groups that come of it."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from hybridrl.config import PPOTrainerConfig
from hybridrl.config.schema import names
from hybridrl.single_controller.ray import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)
from hybridrl.trainer.startup import USES_GPU


class Role(Enum):
    """A part that a worker group plays in the dataflow."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6


#: the pool of replicas that have devices of their own
ROLLOUT_POOL = "rollout_pool"
_GROUP_NAMES = {Role.ActorRollout: "actor_rollout", Role.Critic: "critic", Role.RefPolicy: "ref"}
# Keys of `placement.roles`, the first that is given counts: the reference policy lives with the actor unless told
# otherwise.
_PLACEMENT_KEYS = {
    Role.ActorRollout: ("actor_rollout_ref",),
    Role.Critic: ("critic",),
    Role.RefPolicy: ("ref", "actor_rollout_ref"),
}


def active_roles(config: PPOTrainerConfig) -> list[Role]:
    """The roles of this run, the policy first."""
    roles = [Role.ActorRollout]
    if config.use_critic:
        roles.append(Role.Critic)
    if config.use_reference:
        roles.append(Role.RefPolicy)
    return roles


def default_workers() -> dict[Role, type]:
    """The library's own worker of each role."""
    from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
    from hybridrl.workers.critic import CriticWorker

    return {Role.ActorRollout: ActorRolloutRefWorker, Role.RefPolicy: ActorRolloutRefWorker, Role.Critic: CriticWorker}


def resource_pools(config: PPOTrainerConfig) -> ResourcePoolManager:
    """The pools of `placement.pools`, and the pool of each active role by `placement.roles`."""
    roles = config.placement.roles
    mapping = {role: next(roles[key] for key in _PLACEMENT_KEYS[role] if key in roles) for role in active_roles(config)}
    used = {name: list(config.placement.pools[name]) for name in dict.fromkeys(mapping.values())}
    rollout = config.actor_rollout_ref.rollout
    if rollout.nnodes and rollout.name in names.ENGINES:
        mapping[Role.Rollout] = ROLLOUT_POOL
        used[ROLLOUT_POOL] = [rollout.n_gpus_per_node] * rollout.nnodes
    return ResourcePoolManager(resource_pool_spec=used, mapping=mapping, use_gpu=USES_GPU[config.trainer.device])


def spawn_worker_groups(
    config: PPOTrainerConfig,
    role_worker_mapping: Mapping[Role, Any] | None = None,
    manager: ResourcePoolManager | None = None,
    ray_worker_group_cls: type[RayWorkerGroup] = RayWorkerGroup,
) -> dict[Role, RayWorkerGroup]:
    """Start the processes. Roles of one pool share its processes and take turns; each gets a group of its own to be
    called through.

    Args:
        config: says which roles take part and, where `manager` is None, where they live.
        role_worker_mapping: the worker class of each role; the library's own where None.
    """
    workers = role_worker_mapping or default_workers()
    manager = manager or resource_pools(config)
    manager.create_resource_pool()
    trainer = config.trainer
    timeout = {"timeout_s": config.actor_rollout_ref.nccl_timeout}
    arguments: dict[Role, dict[str, Any]] = {
        Role.ActorRollout: {"config": config.actor_rollout_ref, "role": "actor_rollout", **timeout},
        Role.RefPolicy: {"config": config.actor_rollout_ref, "role": "ref", **timeout},
        Role.Critic: {"config": config.critic, **timeout},
    }
    by_pool: dict[str, list[Role]] = {}
    for role in active_roles(config):
        by_pool.setdefault(manager.mapping[role], []).append(role)
    groups: dict[Role, RayWorkerGroup] = {}
    for roles in by_pool.values():
        classes = {_GROUP_NAMES[role]: RayClassWithInitArgs(cls=workers[role], **arguments[role]) for role in roles}
        fused = ray_worker_group_cls(
            resource_pool=manager.get_resource_pool(roles[0]),
            ray_cls_with_init=create_colocated_worker_cls(classes),
            ray_wait_register_center_timeout=trainer.ray_wait_register_center_timeout,
            timeout_s=trainer.phase_timeout_s,
            threads=trainer.threads_per_worker,
        )
        spawned = fused.spawn(prefix_set=classes.keys())
        groups |= {role: spawned[_GROUP_NAMES[role]] for role in roles}
    return groups
