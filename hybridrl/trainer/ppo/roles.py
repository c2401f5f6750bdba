"""The table of roles: every model that takes part in a run, and everything that the trainer knows about it.

Start-up, loading, evaluation, updates, checkpoints, placement and metrics iterate over this table. To add a model,
write a worker class and its settings, and add a row (`register_role`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from hybridrl.config import PPOTrainerConfig
from hybridrl.errors import ConfigError
from hybridrl.protocol import DataProto
from hybridrl.registry import has_replicas
from hybridrl.single_controller.ray import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)
from hybridrl.trainer.startup import USES_GPU

if TYPE_CHECKING:
    from hybridrl.trainer.ppo.needs import Needs

POLICY = "actor_rollout"
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


def _always(needs: "Needs") -> bool:
    return True


def _at_once(config: PPOTrainerConfig) -> int:
    return 0


@dataclass(frozen=True)
class Pass:
    """A forward pass over a batch before the update: one call of the worker group whose columns join the batch.

    Attributes:
        phase: its name in `timing_s/<phase>`.
        method: the method of the worker group. It gets `MODEL_INPUTS` and returns tensors with the same rows.
        needed: whether the run reads the result.
        advice: what to change if the phase runs out of memory.
        per_token: whether `timing_per_token_ms/<phase>` is reported.
    """

    phase: str
    method: str
    needed: "Callable[[Needs], bool]" = _always
    advice: str = ""
    per_token: bool = True


@dataclass(frozen=True)
class Update:
    """How a role learns from a batch.

    Attributes:
        phase: its name in `timing_s/<phase>`.
        method: the method of the worker group. It gets the batch of an epoch; see `ModelWorker.update`.
        settings: the part of the configuration with `ppo_epochs`, `ppo_mini_batch_size`, `shuffle`,
            `data_loader_seed`.
        fields: fields of the batch that it needs besides `MODEL_INPUTS`.
        optional: further fields that it gets if the batch has them.
        after: number of steps before the role starts to learn. Its schedule begins then.
        advice: what to change if the phase runs out of memory.
    """

    phase: str
    method: str
    settings: Callable[[PPOTrainerConfig], Any]
    fields: tuple[str, ...]
    optional: tuple[str, ...] = ()
    after: Callable[[PPOTrainerConfig], int] = _at_once
    advice: str = ""


@dataclass(frozen=True)
class Saved:
    """A role's part of a checkpoint: its `folder` there, and the `checkpoint` settings."""

    folder: str
    settings: Callable[[PPOTrainerConfig], Any]


@dataclass(frozen=True)
class RoleSpec:
    """A role.

    Attributes:
        name: name of the worker group, and the key of every mapping by role.
        worker: returns the worker class, and imports it only then. The constructor of the class takes `config` and
            `timeout_s`, and the class has `init_model(steps, updates_per_step)`.
        config_of: returns the worker's part of the configuration.
        needed: whether the role takes part in a run.
        placement: keys of `placement.roles`. The first one that is set counts.
        mesh: the dispatch mesh of the worker's methods.
        arguments: further arguments of the worker's constructor.
        passes: forward passes before the update.
        scores: computes scores [B, T] from the batch after the passes. They are added to `token_level_scores`.
        update: how the role learns; None for a frozen model.
        saved: the role's part of a checkpoint; None if there is nothing to save.
    """

    name: str
    worker: Callable[[], Any]
    config_of: Callable[[PPOTrainerConfig], Any]
    needed: Callable[[PPOTrainerConfig], bool]
    placement: tuple[str, ...]
    mesh: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    passes: tuple[Pass, ...] = ()
    scores: Callable[[DataProto], torch.Tensor] | None = None
    update: Update | None = None
    saved: Saved | None = None


def _policy_worker() -> Any:
    from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker

    return ActorRolloutRefWorker


def _critic_worker() -> Any:
    from hybridrl.workers.critic import CriticWorker

    return CriticWorker


_ACTOR = "actor_rollout_ref.actor"
_LOG_PROBS = "log_prob_micro_batch_size_per_gpu (or log_prob_max_token_len_per_gpu)"
_TRAINING = (
    "lower {0}.ppo_micro_batch_size_per_gpu (or ppo_max_token_len_per_gpu with use_dynamic_bsz), set "
    "enable_gradient_checkpointing, or offload with {1}.param_offload and optimizer_offload; a rollout "
    "engine keeps its memory while actor_rollout_ref.rollout.free_cache_engine=False"
)

#: In the order of evaluation. Loading and updating use the reverse order: a critic or reference in the same pool loads
#: before the policy, which generates and must see the memory that is left, and the critic learns before the policy.
ROLES: dict[str, RoleSpec] = {}


def register_role(spec: RoleSpec) -> RoleSpec:
    """Add a row to the table. The role is evaluated after the existing roles, and loads and learns before them.

    Raises:
        ValueError: a role of that name exists.
    """
    if spec.name in ROLES:
        raise ValueError(f"role {spec.name!r} is registered already; roles are {', '.join(ROLES)}")
    ROLES[spec.name] = spec
    return spec


register_role(
    RoleSpec(
        name=POLICY,
        worker=_policy_worker,
        config_of=lambda config: config.actor_rollout_ref,
        needed=lambda config: True,
        placement=("actor_rollout_ref",),
        mesh="actor",
        arguments={"role": POLICY},
        passes=(
            Pass(
                "old_log_prob",
                "compute_log_prob",
                needed=lambda needs: needs.old_log_probs,
                advice=f"lower actor_rollout_ref.rollout.{_LOG_PROBS}",
                per_token=False,  # verl has no such metric
            ),
        ),
        update=Update(
            "update_actor",
            "update_actor",
            settings=lambda config: config.actor_rollout_ref.actor,
            fields=("advantages",),
            optional=("old_log_probs", "rollout_log_probs", "ref_log_prob", "rollout_is_weights"),
            after=lambda config: config.trainer.critic_warmup,
            advice=_TRAINING.format(_ACTOR, f"{_ACTOR}.fsdp_config"),
        ),
        saved=Saved("actor", lambda config: config.actor_rollout_ref.actor.checkpoint),
    )
)
register_role(
    RoleSpec(
        name="ref",
        worker=_policy_worker,
        config_of=lambda config: config.actor_rollout_ref,
        needed=lambda config: config.use_reference,
        placement=("ref", "actor_rollout_ref"),  # with the actor unless it is placed elsewhere
        mesh="ref",
        arguments={"role": "ref"},
        passes=(
            Pass(
                "ref",
                "compute_ref_log_prob",
                needed=lambda needs: needs.ref_log_prob,
                advice=f"lower actor_rollout_ref.ref.{_LOG_PROBS}",
            ),
        ),
    )
)
register_role(
    RoleSpec(
        name="critic",
        worker=_critic_worker,
        config_of=lambda config: config.critic,
        needed=lambda config: config.use_critic,
        placement=("critic",),
        mesh="critic",
        passes=(Pass("values", "compute_values", advice="lower critic.forward_micro_batch_size_per_gpu"),),
        update=Update(
            "update_critic",
            "update_critic",
            settings=lambda config: config.critic,
            fields=("values", "returns"),
            advice=_TRAINING.format("critic", "critic.fsdp"),
        ),
        saved=Saved("critic", lambda config: config.critic.checkpoint),
    )
)


def active_roles(config: PPOTrainerConfig) -> list[RoleSpec]:
    """Return the roles of this run, in the table's order.

    Raises:
        ConfigError: `roles` has settings for a role that is not registered.
    """
    unknown = [name for name in config.roles if name not in ROLES]
    if unknown:
        raise ConfigError(
            f"roles.{unknown[0]}: no such role; registered are {', '.join(ROLES)}. Register it with register_role in a "
            "module that actor_rollout_ref.model.external_lib names"
        )
    return [spec for spec in ROLES.values() if spec.needed(config)]


def own_settings(name: str, cls: type) -> Callable[[PPOTrainerConfig], Any]:
    """Return `config_of` for a role with its own settings: `roles.<name>` as an instance of the dataclass `cls`."""

    def config_of(config: PPOTrainerConfig) -> Any:
        given = dict(config.roles.get(name, {}))
        known = {field.name: field for field in dataclasses.fields(cls)}
        nothing = dataclasses.MISSING
        required = [key for key, f in known.items() if f.default is nothing and f.default_factory is nothing]
        faults = [f"roles.{name}.{key}: unknown key; there are {', '.join(known)}" for key in given if key not in known]
        faults += [f"roles.{name}.{key} is missing" for key in required if key not in given]
        if faults:
            raise ConfigError(faults)
        return cls(**given)

    return config_of


def phases_per_token() -> tuple[str, ...]:
    """Return the phases that process every token of prompts and responses. Their time per token is reported."""
    passes = [one.phase for spec in ROLES.values() for one in spec.passes if one.per_token]
    return (*passes, "adv", *(spec.update.phase for spec in ROLES.values() if spec.update is not None))


def resource_pools(config: PPOTrainerConfig) -> ResourcePoolManager:
    """Return the pools of `placement.pools`, and the pool of each active role by `placement.roles`.

    Raises:
        ConfigError: a role has no pool.
    """
    roles, mapping = config.placement.roles, {}
    for spec in active_roles(config):
        pool = next((roles[key] for key in spec.placement if key in roles), None)
        if pool is None:
            raise ConfigError(
                f"placement.roles.{spec.placement[0]} is missing; name the pool that {spec.name} lives in"
            )
        mapping[spec.name] = pool
    used = {name: list(config.placement.pools[name]) for name in dict.fromkeys(mapping.values())}
    rollout = config.actor_rollout_ref.rollout
    if rollout.nnodes and has_replicas(rollout.name):
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
    worker group.

    Args:
        config: says which roles take part and, if `manager` is None, in which pools they run.
        role_worker_mapping: worker classes by role, in place of those in the table.
    """
    workers = role_worker_mapping or {}
    manager = manager or resource_pools(config)
    manager.create_resource_pool()
    trainer, timeout_s = config.trainer, config.actor_rollout_ref.nccl_timeout
    by_pool: dict[str, list[RoleSpec]] = {}
    for spec in active_roles(config):
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
        }
        fused = ray_worker_group_cls(
            resource_pool=manager.get_resource_pool(specs[0].name),
            ray_cls_with_init=create_colocated_worker_cls(classes),
            ray_wait_register_center_timeout=trainer.ray_wait_register_center_timeout,
            timeout_s=trainer.phase_timeout_s,
            threads=trainer.threads_per_worker,
        )
        groups |= fused.spawn(prefix_set=classes.keys())
    return groups
