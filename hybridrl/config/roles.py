"""The table of roles: every model that takes part in a run of `ppo_trainer`, and everything known about it.

Checks, start-up, loading, evaluation, updates, checkpoints, placement and metrics iterate over this table. To add a
model, write a worker class and a dataclass of its settings, and add a row (`register_role`).
"""

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.config.entry_settings import read_own
from hybridrl.config.schema.model import ModelConfig
from hybridrl.config.schema.prime import PrimeConfig
from hybridrl.config.schema.root import PPOTrainerConfig
from hybridrl.config.served import ServedModel, served_judge, served_reward_model, served_teachers
from hybridrl.config.teachers import TEACHER_FIELDS, TEACHER_INDEX, teachers_of
from hybridrl.errors import ConfigError
from hybridrl.registry import ADV_ESTIMATORS

#: rows that checks and workers ask for: the policy, the frozen copy that it is compared with, the teachers
POLICY, REFERENCE, TEACHER = "actor_rollout", "ref", "teacher"


def _always(needs: Any) -> bool:
    return True


def _never(config: PPOTrainerConfig) -> bool:
    return False


def _no_pool(config: PPOTrainerConfig) -> list[int]:
    return []


def _no_copy(settings: Any) -> None:
    return None


def _not_served(config: PPOTrainerConfig) -> tuple[ServedModel, ...]:
    return ()


def _at_once(config: PPOTrainerConfig) -> int:
    return 0


@dataclass(frozen=True)
class MicroBatches:
    """The settings by which a phase divides rows into micro-batches.

    Attributes:
        where: their group.
        size: sequences that a process computes at once.
        tokens: most tokens that it computes at once, where micro-batches are filled by tokens.
        dynamic: whether they are.
    """

    where: str
    size: str = "ppo_micro_batch_size_per_gpu"
    tokens: str = "ppo_max_token_len_per_gpu"
    dynamic: str = "use_dynamic_bsz"


@dataclass(frozen=True)
class Pass:
    """A forward pass over a batch before the update: one call of the worker group whose columns join the batch.

    Attributes:
        phase: its name in `timing_s/<phase>`.
        method: the method of the worker group. It gets `MODEL_INPUTS` and `OPTIONAL_INPUTS`, and returns
            tensors with the same rows.
        needed: whether the run reads the result, by its `trainer.ppo.run_requirements.RunRequirements`.
        advice: what to change if the phase runs out of memory.
        per_token: whether `timing_per_token_ms/<phase>` is reported.
        optional: further fields that it gets if the batch has them.
        gives: columns that it returns, which an estimator may need.
        batching: its micro-batches, for advice on speed.
    """

    phase: str
    method: str
    needed: Callable[[Any], bool] = _always
    advice: str = ""
    per_token: bool = True
    optional: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    batching: MicroBatches | None = None


@dataclass(frozen=True)
class Scoring:
    """A role's scoring of finished responses before groups are chosen: a call of the worker group for each batch.

    With a weight w, w times the score is added to the reward at the last generated token of each response.

    Attributes:
        phase: its name in `timing_s/<phase>`.
        method: the method of the worker group. It gets what the reader makes of a batch, and returns scores [B, 1] as
            `column`.
        column: the scores' name in the batch, in dumps and in `reward/<column>/mean`.
        reader: returns a class, imported only then. It is called with the configuration and the policy's tokenizer
            before a model is loaded, when it may raise a `UserError`, and its result with each batch. Where the result
            has a method `rewards`, that makes rewards [B, T] and columns of the scores, what was read and the batch.
        weight: w.
        advice: what to change if the phase runs out of memory.
        batching: its micro-batches, for advice on speed.
    """

    phase: str
    method: str
    column: str
    reader: Callable[[], Any]
    weight: Callable[[PPOTrainerConfig], float]
    advice: str = ""
    batching: MicroBatches | None = None


@dataclass(frozen=True)
class Update:
    """A role's update from a batch. Its settings have `ppo_epochs`, `ppo_mini_batch_size`, `shuffle` and
    `data_loader_seed`.

    Attributes:
        phase: its name in `timing_s/<phase>`.
        method: the method of the worker group. It gets the batch of an epoch; see `ModelWorker.update`.
        fields: fields of the batch that it needs besides `MODEL_INPUTS`.
        optional: further fields that it gets if the batch has them.
        after: number of steps before the role starts to learn. Its schedule begins then.
        first: whether it learns before the passes, which then use its new weights. Its fields are the sampler's.
        advice: what to change if the phase runs out of memory.
        batching: its micro-batches, for advice on speed.
        value_head: whether the model's output layer is a value head, which counts for the FLOPs of the update.
    """

    phase: str
    method: str
    fields: tuple[str, ...]
    optional: tuple[str, ...] = ()
    after: Callable[[PPOTrainerConfig], int] = _at_once
    first: Callable[[PPOTrainerConfig], bool] = _never
    advice: str = ""
    batching: MicroBatches | None = None
    value_head: bool = False


@dataclass(frozen=True)
class RoleSpec:
    """A role.

    The checks before a run go by the types of its settings: a `ModelConfig`, `FSDPConfig`, `OptimConfig` or
    `CheckpointConfig` among them, batch sizes and token limits are checked as those of the policy are.

    Attributes:
        name: name of the worker group, and the key of every mapping by role.
        worker: returns the worker class, and imports it only then. The constructor of the class takes `config` and
            `timeout_s`, and the class has `init_model(steps, updates_per_step)`. None where engines serve the role in
            every run.
        needed: whether the role takes part in a run.
        placement: keys of `placement.roles`. The first one that is set counts.
        own_pool: the processes of a pool of its own, by node; empty if `placement` decides.
        mesh: the dispatch mesh of the worker's methods.
        settings: dataclass of its settings, which are `roles.<name>`; None if they are at `path`, or if it has none.
        path: where the settings of a built-in role are.
        config: path of what the worker's constructor gets as `config`, or a function of the whole configuration that
            returns it; by default the settings.
        arguments: further arguments of the worker's constructor.
        copy: the second model that the worker loads, and the setting that names it, from the role's settings; None
            if there is none.
        passes: forward passes before the update.
        scoring: how it scores responses before groups are chosen; None if it does not.
        asked_in: the phase in which the reward manager asks the role's model; "" if it does not. The role's `server` is
            then a `trainer.ppo.judge.ServedJudge`.
        served: the models of the role that inference engines serve in replicas in this run; none: the worker computes.
        server: returns the class that then stands in for the worker group, a `trainer.ppo.served.ServedRole`.
        scores: computes scores [B, T] from the batch after the passes. They are added to `token_level_scores`.
        update: how the role learns; None for a frozen model.
        saved: the role's folder in a checkpoint, whose contents are those of `checkpoint` in its settings; None if
            there is nothing to save.
    """

    name: str
    worker: Callable[[], Any] | None
    needed: Callable[[PPOTrainerConfig], bool]
    placement: tuple[str, ...]
    mesh: str
    settings: type | None = None
    path: str = ""
    config: str | Callable[[PPOTrainerConfig], Any] = ""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    copy: Callable[[Any], tuple[str, ModelConfig] | None] = _no_copy
    own_pool: Callable[[PPOTrainerConfig], list[int]] = _no_pool
    passes: tuple[Pass, ...] = ()
    scoring: Scoring | None = None
    asked_in: str = ""
    served: Callable[[PPOTrainerConfig], tuple[ServedModel, ...]] = _not_served
    server: Callable[[], Any] | None = None
    scores: Callable[[Any], Any] | None = None
    update: Update | None = None
    saved: str | None = None

    @property
    def where(self) -> str:
        """Where its settings are in the configuration."""
        return self.path or f"roles.{self.name}"

    @property
    def model_path(self) -> str:
        """Where the settings of the model that its worker loads are in the configuration, if it loads one."""
        return f"{self.config if isinstance(self.config, str) and self.config else self.where}.model"

    def settings_of(self, config: PPOTrainerConfig) -> Any:
        """Return its settings.

        Raises:
            ConfigError: keys or values of `roles.<name>` do not fit its dataclass.
        """
        if self.settings is None:
            return part_of(config, self.path) if self.path else None
        own, faults = read_own(self.settings, config.roles.get(self.name) or {}, f"roles.{self.name}.", config)
        if faults:
            raise ConfigError(faults)
        return own

    def config_of(self, config: PPOTrainerConfig) -> Any:
        """Return what the worker's constructor gets as `config`; raises like `settings_of`."""
        if callable(self.config):
            return self.config(config)
        return part_of(config, self.config) if self.config else self.settings_of(config)


def part_of(config: Any, path: str) -> Any:
    """Return the part of a configuration at a dotted path."""
    return functools.reduce(getattr, path.split("."), config)


def groups_of(settings: Any, kind: type) -> list[tuple[str, Any]]:
    """Return the groups of a type among a role's settings, by name."""
    fields = dataclasses.fields(settings) if settings is not None else ()
    values = [(field.name, getattr(settings, field.name)) for field in fields]
    return [(name, value) for name, value in values if isinstance(value, kind)]


def _imported(module: str, name: str) -> Callable[[], Any]:
    """Return a function that imports `name`: workers import torch and Ray, which the checks do not need."""
    return lambda: getattr(importlib.import_module(module), name)


_policy_worker = _imported("hybridrl.workers.actor_rollout_ref", "ActorRolloutRefWorker")

_ACTOR = "actor_rollout_ref.actor"
_LOG_PROBS = "log_prob_micro_batch_size_per_gpu (or log_prob_max_token_len_per_gpu)"
_TRAINING = (
    "lower {0}.ppo_micro_batch_size_per_gpu (or ppo_max_token_len_per_gpu with use_dynamic_bsz), set "
    "enable_gradient_checkpointing, or offload with param_offload and optimizer_offload in {1} (or .megatron); a "
    "rollout engine keeps its memory while actor_rollout_ref.rollout.free_cache_engine=False"
)


def _log_probs(where: str) -> MicroBatches:
    size, tokens = "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu"
    return MicroBatches(where, size, tokens, "log_prob_use_dynamic_bsz")


_REFERENCE_PASS = Pass(
    "ref",
    "compute_ref_log_prob",
    needed=lambda needs: needs.ref_log_prob,
    advice=f"lower actor_rollout_ref.ref.{_LOG_PROBS}",
    batching=_log_probs("actor_rollout_ref.ref"),
)

#: In the order of evaluation. Loading and updating use the reverse order: a critic or reference in the same pool loads
#: before the policy, which generates and must see the memory that is left, and the critic learns before the policy.
ROLES: dict[str, RoleSpec] = {}


def register_role(spec: RoleSpec) -> RoleSpec:
    """Add a row to the table. The role is evaluated after the existing roles, and loads and learns before them.

    A row of the same name is replaced if its file is loaded both by its path and by its module's name.

    Raises:
        ValueError: another role of that name exists.
    """
    if spec.name in ROLES and not _same_lines(ROLES[spec.name].needed, spec.needed):
        raise ValueError(f"role {spec.name!r} is registered already; roles are {', '.join(ROLES)}")
    ROLES[spec.name] = spec
    return spec


def _same_lines(first: Any, second: Any) -> bool:
    """Whether two functions come from the same lines of a file that was loaded twice."""
    codes = [getattr(function, "__code__", None) for function in (first, second)]
    places = [None if code is None else (os.path.realpath(code.co_filename), code.co_firstlineno) for code in codes]
    return first is not second and places[0] is not None and places[0] == places[1]


register_role(
    RoleSpec(
        name=POLICY,
        worker=_policy_worker,
        path=_ACTOR,
        config="actor_rollout_ref",
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
                optional=("routed_experts",),
                batching=_log_probs("actor_rollout_ref.rollout"),
            ),
            dataclasses.replace(_REFERENCE_PASS, needed=lambda needs: needs.ref_log_prob and needs.reference_in_policy),
        ),
        update=Update(
            "update_actor",
            "update_actor",
            fields=("advantages",),
            optional=(
                "old_log_probs",
                "rollout_log_probs",
                "ref_log_prob",
                "rollout_is_weights",
                "routed_experts",
                *TEACHER_FIELDS,
            ),
            after=lambda config: config.trainer.critic_warmup,
            advice=_TRAINING.format(_ACTOR, f"{_ACTOR}.fsdp_config"),
            batching=MicroBatches(_ACTOR),
        ),
        saved="actor",
    )
)
register_role(
    RoleSpec(
        name=REFERENCE,
        worker=_policy_worker,
        path="actor_rollout_ref.ref",
        config="actor_rollout_ref",
        needed=lambda config: config.has_reference_model,
        placement=("ref", "actor_rollout_ref"),  # with the actor unless it is placed elsewhere
        mesh="ref",
        arguments={"role": REFERENCE},
        passes=(_REFERENCE_PASS,),
    )
)
register_role(
    RoleSpec(
        name=TEACHER,
        worker=_imported("hybridrl.workers.teacher", "TeacherWorker"),
        path="distillation",
        config=teachers_of,
        needed=lambda config: config.distillation.enabled,
        placement=("teacher", "actor_rollout_ref"),  # with the actor unless it is placed elsewhere
        own_pool=lambda config: [config.distillation.n_gpus_per_node] * config.distillation.nnodes,
        mesh="teacher",
        passes=(
            Pass(
                "teacher",
                "compute_teacher",
                needed=lambda needs: needs.teacher,
                advice="lower distillation.teacher_models.NAME.inference.max_num_batched_tokens, or set "
                "distillation.fsdp_config.param_offload=True",
                optional=(TEACHER_INDEX,),
            ),
        ),
        served=served_teachers,
        server=_imported("hybridrl.trainer.ppo.served_role", "ServedTeachers"),
    )
)
register_role(
    RoleSpec(
        name="critic",
        worker=_imported("hybridrl.workers.critic", "CriticWorker"),
        path="critic",
        needed=lambda config: config.use_critic,
        placement=("critic",),
        mesh="critic",
        passes=(
            Pass(
                "values",
                "compute_values",
                advice="lower critic.forward_micro_batch_size_per_gpu",
                batching=MicroBatches("critic", "forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu"),
            ),
        ),
        update=Update(
            "update_critic",
            "update_critic",
            fields=("values", "returns"),
            advice=_TRAINING.format("critic", "critic.fsdp"),
            batching=MicroBatches("critic"),
            value_head=True,
        ),
        saved="critic",
    )
)


register_role(
    RoleSpec(
        name="reward_model",
        worker=_imported("hybridrl.workers.reward_model", "RewardModelWorker"),
        path="reward.reward_model",
        needed=lambda config: config.reward.reward_model.enable and not config.reward.reward_model.is_judge,
        placement=("reward_model", "actor_rollout_ref"),
        own_pool=lambda config: config.reward.reward_model.own_pool,
        mesh="reward_model",
        scoring=Scoring(
            "reward_model",
            "compute_rm_score",
            column="rm_scores",
            reader=_imported("hybridrl.reward.conversations", "reader_of"),
            weight=lambda config: config.reward.reward_model.weight,
            advice="lower reward.reward_model.micro_batch_size_per_gpu (or forward_max_token_len_per_gpu with "
            "use_dynamic_bsz) or max_length, or set reward.reward_model.enable_resource_pool",
            batching=MicroBatches("reward.reward_model", "micro_batch_size_per_gpu", "forward_max_token_len_per_gpu"),
        ),
        served=served_reward_model,
        server=_imported("hybridrl.trainer.ppo.served_role", "ServedRewardModel"),
    )
)


register_role(
    RoleSpec(
        name="judge",
        worker=None,
        path="reward.reward_model.judge",
        config="reward.reward_model",
        needed=lambda config: config.reward.reward_model.serves_judge,
        placement=("reward_model", "actor_rollout_ref"),
        own_pool=lambda config: config.reward.reward_model.own_pool,
        mesh="judge",
        asked_in="reward",
        served=served_judge,
        server=_imported("hybridrl.trainer.ppo.served_judge", "ServedJudge"),
    )
)


register_role(
    RoleSpec(
        name="prime",
        worker=_imported("hybridrl.workers.prime", "PrimeWorker"),
        settings=PrimeConfig,
        needed=lambda config: "process_rewards" in ADV_ESTIMATORS.metadata(config.algorithm.adv_estimator).needs,
        placement=("prime", "actor_rollout_ref"),
        mesh="prime",
        copy=lambda settings: ("ref_path", settings.frozen),
        passes=(
            Pass(
                "process_rewards",
                "compute_process_rewards",
                advice="lower roles.prime.ppo_micro_batch_size_per_gpu",
                gives=("process_rewards",),
                batching=MicroBatches("roles.prime"),
            ),
        ),
        update=Update(
            "update_prime",
            "update_prime",
            fields=("token_level_scores",),
            optional=("prime_ref_log_prob",),
            first=lambda config: ROLES["prime"].settings_of(config).update == "before",
            advice=_TRAINING.format("roles.prime", "roles.prime.fsdp_config"),
            batching=MicroBatches("roles.prime"),
        ),
        saved="prime",
    )
)


def phases_per_token() -> tuple[str, ...]:
    """Return the phases that process every token of prompts and responses. Their time per token is reported."""
    passes = dict.fromkeys(
        forward_pass.phase for spec in ROLES.values() for forward_pass in spec.passes if forward_pass.per_token
    )
    return (*passes, "adv", *(spec.update.phase for spec in ROLES.values() if spec.update is not None))


def pool_of(spec: RoleSpec, config: PPOTrainerConfig) -> str | None:
    """Return the name of the pool that a role runs in; None if `placement.roles` names none."""
    if spec.own_pool(config):
        return f"{spec.name}_pool"
    roles = config.placement.roles
    return next((roles[key] for key in spec.placement if key in roles), None)


def shares_pool(spec: RoleSpec, config: PPOTrainerConfig) -> bool:
    """Return whether another role of the run has the same devices.

    Raises:
        ConfigError: see `active_roles`.
    """
    pool = pool_of(spec, config)
    return any(pool_of(other, config) == pool for other in active_roles(config) if other is not spec)


def pools_of(config: PPOTrainerConfig) -> dict[str, list[int]]:
    """Return the pools of a run by name, with their processes by node: those of `placement.pools` and of roles."""
    own = {f"{spec.name}_pool": spec.own_pool(config) for spec in active_roles(config)}
    return {**config.placement.pools, **{name: nodes for name, nodes in own.items() if nodes}}


def active_roles(config: PPOTrainerConfig) -> list[RoleSpec]:
    """Return the roles of this run, in the table's order.

    Raises:
        ConfigError: `roles` has settings for a role that is not registered, or that is configured elsewhere.
    """
    faults = [
        f"roles.{name}: no such role; registered are {', '.join(ROLES)}. Register it with register_role in a module "
        "that actor_rollout_ref.model.external_lib names"
        if name not in ROLES
        else f"roles.{name}: this role has no settings here{'; see ' * bool(ROLES[name].path)}{ROLES[name].path}"
        for name in config.roles
        if name not in ROLES or ROLES[name].settings is None
    ]
    if faults:
        raise ConfigError(faults)
    return [spec for spec in ROLES.values() if spec.needed(config)]
