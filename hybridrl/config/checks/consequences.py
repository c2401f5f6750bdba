"""Valid settings with a consequence that the user may not expect; each is one notice before the run."""

import dataclasses
from collections.abc import Iterator, Mapping

from hybridrl.config.checks.distillation import distillation_notices
from hybridrl.config.checks.served import served_notices
from hybridrl.config.roles import active_roles, pool_of
from hybridrl.config.schema.engine import FSDPConfig
from hybridrl.config.schema.profiler import GlobalProfilerConfig, RoleProfilerConfig
from hybridrl.config.schema.root import ActorRolloutRefConfig, PPOTrainerConfig, RootConfig, SupervisedConfig
from hybridrl.registry import ADV_ESTIMATORS

_ROLLOUT = "actor_rollout_ref.rollout"


def consequences(config: RootConfig) -> Iterator[str]:
    """Yield the notices about a configuration without faults."""
    if isinstance(config, PPOTrainerConfig):
        yield from _of_training(config)
    if isinstance(config, SupervisedConfig):
        yield from _of_profiling(config.global_profiler, {"profiler": config.profiler})


def _of_training(config: PPOTrainerConfig) -> Iterator[str]:
    name, rollout = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout
    if ADV_ESTIMATORS.facts(name).compares_samples and rollout.n == 1:
        yield (
            f"algorithm.adv_estimator={name} compares the samples of a prompt with each other, and {_ROLLOUT}.n=1: "
            "without others to compare with, there is no baseline and each response is reinforced by its own score. "
            "Set n to 2 or more, 8 is usual"
        )
    where, correction = "algorithm.rollout_correction", config.algorithm.rollout_correction
    if correction.bypass_mode and correction.loss_type == "ppo_clip" and correction.rollout_is is not None:
        yield (
            f"{where}.rollout_is={correction.rollout_is} has no effect with bypass_mode=True and loss_type=ppo_clip, "
            "whose clipped ratio is against the sampler already. Set rollout_is=null, or loss_type=reinforce"
        )
    check = rollout.val_kwargs
    if check.n > 1 and not check.do_sample:
        yield (
            f"{_ROLLOUT}.val_kwargs.n={check.n} with do_sample=False: greedy samples of a prompt are all alike, so "
            f"validation costs {check.n} times as much for the same result. Set val_kwargs.do_sample=True and a "
            "temperature, or n=1"
        )
    if config.actor_rollout_ref.model.adapted:
        yield from _of_own_reference(config.actor_rollout_ref)
    profilers = {
        f"{spec.where}.profiler": getattr(spec.settings_of(config), "profiler", None) for spec in active_roles(config)
    }
    chosen = {key: one for key, one in profilers.items() if isinstance(one, RoleProfilerConfig)}
    yield from _of_profiling(config.global_profiler, chosen)
    yield from distillation_notices(config)
    yield from served_notices(config)
    used = {pool_of(spec, config) for spec in active_roles(config)}
    for pool, processes in config.placement.pools.items():
        roles = [role for role, name in config.placement.roles.items() if name == pool]
        if pool != "global" and roles and pool not in used:
            yield (
                f"placement.pools.{pool}={processes} stays idle: of its roles ({', '.join(roles)}) none takes part in "
                f"this run (algorithm.adv_estimator={name}). Give its devices to another pool, e.g. placement=colocated"
            )


def _of_profiling(wanted: GlobalProfilerConfig, roles: Mapping[str, RoleProfilerConfig]) -> Iterator[str]:
    """Say by which setting no profile is written. `roles` are by key, first the one that is named."""
    where = next(iter(roles))
    enabled = {name: one for name, one in roles.items() if one.enable}
    if wanted.tool is None:
        if wanted.steps or enabled:
            yield (
                "no profile is written, because global_profiler.tool=null: set it to torch, torch_memory or nsys, and "
                "global_profiler.steps to the steps to profile"
            )
    elif not wanted.steps:
        yield f"no profile is written: global_profiler.tool={wanted.tool} needs global_profiler.steps, such as [3]"
    elif not any(one.all_ranks or one.ranks for one in enabled.values()):
        yield (
            f"no profile is written, because no rank is chosen: set {where}.enable=True, and {where}.all_ranks=True or "
            f"{where}.ranks=[0]"
        )


def _of_own_reference(policy: ActorRolloutRefConfig) -> Iterator[str]:
    """Settings of a reference's engine, where the reference is the policy without its adapter."""
    ref, plain, own = policy.ref.fsdp_config, FSDPConfig(), policy.actor.fsdp_config
    names = [field.name for field in dataclasses.fields(plain) if field.name not in ("forward_only", "strategy")]
    unread = [f"fsdp_config.{name}={ref[name]}" for name in names if ref[name] not in (plain[name], own[name])]
    if policy.ref.strategy != policy.actor.strategy:
        unread.insert(0, f"strategy={policy.ref.strategy}")
    if unread:
        yield (
            f"actor_rollout_ref.ref: {', '.join(unread)} has no effect with an adapter: the reference is the policy "
            "without it, so no second model is loaded"
        )
