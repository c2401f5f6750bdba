"""The memory that the phases of a run will take, computed before any model is loaded."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from hybridrl.config import ModelConfig, OptimConfig, PPOTrainerConfig
from hybridrl.config.dotted import get_key
from hybridrl.config.entry_settings import engine_group, group_type
from hybridrl.config.roles import POLICY, ROLES, MicroBatches, RoleSpec, active_roles, groups_of
from hybridrl.config.schema.engine import EngineConfig
from hybridrl.config.served import ServedModel
from hybridrl.forecast import remedies, run_forecast
from hybridrl.forecast.role_models import forecast_roles
from hybridrl.forecast.run_forecast import MemoryForecast, on_first_worker
from hybridrl.forecast.sizes import Forecast
from hybridrl.registry import INFERENCE_ENGINES, TRAIN_ENGINES, import_external_lib
from hybridrl.single_controller.ray import RayWorkerGroup, ResourcePoolManager
from hybridrl.trainer.planning import with_plan
from hybridrl.trainer.ppo.role_groups import resource_pools

ForRoles = Callable[[PPOTrainerConfig, Mapping[str, int]], dict[str, Forecast | None]]

_MIB = 1024**2
_ENGINE_BYTES = 2  # of a parameter in an inference engine: bfloat16
_UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization"
#: settings of a model that learns, the cheapest first
_OF_MODELS: tuple[tuple[str, Any], ...] = (
    ("enable_gradient_checkpointing", True),
    ("recompute_granularity", "full"),
    ("enable_activation_offload", True),
    ("tiled_mlp.enabled", True),
)
_LEAST_UTILIZATION = 0.1


@dataclass(frozen=True, slots=True)
class RunForecast(MemoryForecast):
    """Bytes per device of each phase.

    Attributes:
        engine: what the inference engine takes on the policy's devices while it generates.
        sleeping: what it keeps during training.
        receiving: its weights, and the buffers in which new ones are sent to it.
        pools: the pool of each role. Models in one pool share devices.
        served: what the engines of a served role take on its devices while they read.
        idle: what they keep otherwise.
    """

    roles: Mapping[str, Forecast | None]
    engines: Mapping[str, str]
    engine: float
    sleeping: float
    receiving: float
    pools: Mapping[str, str]
    served: Mapping[str, float]
    idle: Mapping[str, float]

    def phases(self) -> dict[str, float]:
        """The peak of each phase, on the devices where it runs."""
        peaks: dict[str, float] = {}
        policy = self.roles.get(POLICY)
        if policy is not None:
            resident = self._resident(POLICY)
            peaks["gen"] = resident + max(self.engine, policy.weights - policy.kept_weights)
            sent = resident - policy.resident + policy.without_gradients - policy.pass_activations
            peaks["update_weights"] = sent + max(self.receiving, self.sleeping)
        peaks |= self._served_phases()
        for name, model in self.roles.items():
            spec = ROLES.get(name)
            if model is None or spec is None:
                continue
            others = self._resident(name) - model.resident + (self.sleeping if self._with_policy(name) else 0)
            if spec.scoring is not None:  # an engine on the same devices keeps its weights meanwhile
                engine = max(self.receiving, self.sleeping) if self._with_policy(name) else 0.0
                peaks[spec.scoring.phase] = self._resident(name) - model.resident + engine + model.without_gradients
            for each in spec.passes:
                peaks[each.phase] = others + model.without_gradients
            if spec.update is not None:
                peaks[spec.update.phase] = others + model.update
        return peaks

    def _served_phases(self) -> dict[str, float]:
        """The peaks while the engines of served roles read."""
        peaks: dict[str, float] = {}
        for name, engines in self.served.items():
            spec = ROLES[name]
            peak = self._resident(name) - self.idle[name] + max(engines, self.idle[name])
            phase = spec.asked_in if spec.scoring is None else spec.scoring.phase
            if phase:
                beside = max(self.receiving, self.sleeping) if self._with_policy(name) else 0.0
                peaks[phase] = peak + beside
            for each in spec.passes:
                peaks[each.phase] = peak + (self.sleeping if self._with_policy(name) else 0.0)
        return peaks

    def _resident(self, role: str) -> float:
        """Bytes that all models keep on the devices of this role."""
        models = [model for name, model in self.roles.items() if self.pools[name] == self.pools[role]]
        engines = sum(size for name, size in self.idle.items() if self.pools[name] == self.pools[role])
        return engines + sum(model.resident for model in models if model is not None)

    def _with_policy(self, role: str) -> bool:
        return self.pools[role] == self.pools.get(POLICY)


def forecast_run(
    config: PPOTrainerConfig, total: float | None = None, compute: ForRoles = forecast_roles
) -> RunForecast:
    """Compute the forecast. It takes the time of a few passes through models without weights.

    Args:
        total: bytes of a GPU, of which an inference engine takes its share; None without GPUs.
        compute: `forecast_roles`, in a process that has a device of the kind that the models will have.
    """
    manager = resource_pools(config)
    ranks = _ranks(manager)
    rollout = config.actor_rollout_ref.rollout
    shares = rollout.name == "auto" or INFERENCE_ENGINES.metadata(rollout.name).reserves_of_total
    engine = 0.0
    if total is not None and shares and not rollout.nnodes:
        engine = rollout.gpu_memory_utilization * total
    served = {spec.name: models for spec in active_roles(config) if (models := spec.served(config))}
    computed = {name: count for name, count in ranks.items() if name not in served}
    roles, receiving = compute(config, computed), 0.0
    policy = roles.get(POLICY)
    if engine and policy is not None:
        weights = _ENGINE_BYTES * policy.parameters
        buckets = min(weights, 2 * rollout.checkpoint_engine.update_weights_bucket_megabytes * _MIB)
        receiving = weights / rollout.tensor_model_parallel_size + buckets
    return RunForecast(
        roles=roles,
        engines={
            name: f"{served[name][0].where}.name" if name in served else _chosen_engine(config, name) for name in ranks
        },
        engine=engine,
        sleeping=0.0 if rollout.free_cache_engine else engine,
        receiving=receiving,
        pools={str(name): str(manager.mapping[name]) for name in ranks},
        served={name: max(_engine_bytes(models, total)) for name, models in served.items()},
        idle={
            name: sum(
                0.0 if model.rollout.free_cache_engine else size
                for model, size in zip(models, _engine_bytes(models, total), strict=True)
            )
            for name, models in served.items()
        },
    )


def _ranks(manager: ResourcePoolManager) -> dict[str, int]:
    """The number of ranks of each role."""
    return {str(name): sum(manager.resource_pool_spec[pool]) for name, pool in manager.mapping.items() if name in ROLES}


def _engine_bytes(models: Sequence[ServedModel], total: float | None) -> list[float]:
    """Bytes that the engine of each model takes of a device."""
    return [0.0 if total is None else model.rollout.gpu_memory_utilization * total for model in models]


def _chosen_engine(config: PPOTrainerConfig, role: str) -> str:
    strategy = getattr(ROLES[role].settings_of(config), "strategy", None)
    return "its worker" if strategy is None else f"{ROLES[role].where}.strategy={strategy}"


def refuse_if_too_large(
    config: PPOTrainerConfig, expected: RunForecast, total: float, compute: ForRoles = forecast_roles
) -> None:
    """Refuse a run that cannot fit, and warn of one that cannot with sequences of full length.

    Args:
        expected: its forecast.
        total: bytes of a device.
        compute: see `forecast_run`.

    Raises:
        PlacementError: a phase takes more than a device has, however short sequences are; the error names the keys
            that would make it fit.
    """
    run_forecast.refuse_if_too_large(expected, total, lambda: changes_that_fit(config, total, compute))


def changes_that_fit(
    config: PPOTrainerConfig, total: float, compute: ForRoles = forecast_roles
) -> tuple[list[tuple[str, Any]], bool]:
    """Return settings that lower the peak, the cheapest first, as few as are needed, and whether they suffice."""
    return remedies.fewest_changes(
        config,
        total,
        lambda settings: forecast_run(settings, total, compute).peak,
        lambda settings: _candidates(settings, total, compute),
        _value,
    )


def _candidates(config: PPOTrainerConfig, total: float, compute: ForRoles) -> Iterator[dict[str, Any]]:
    rollout = config.actor_rollout_ref.rollout
    sequence = rollout.prompt_length + rollout.response_length

    def fullest() -> str:
        phases = forecast_run(config, total, compute).phases()
        return max(phases, key=lambda name: phases[name], default="")

    for key, value in _changes(config, fullest):
        if value == "a sequence":
            if _value(config, key) > sequence:
                yield {key: sequence}
        elif value == "what is left":
            expected = forecast_run(config, total, compute)
            share = (total - expected.phases().get("gen", 0.0) + expected.engine) / total
            fitting = math.floor(100 * share) / 100
            if _LEAST_UTILIZATION <= fitting < _value(config, key):
                yield {key: fitting}
        elif value == "8 bits":
            if settings := remedies.eight_bit_adam(key, _value(config, key)):
                yield settings
        elif _value(config, key) != value:
            yield {key: value}


@dataclass(frozen=True)
class _Tunable:
    """A role of the run, and where its settings are that decide how much memory it takes.

    Attributes:
        spec: its row in the table.
        ranks: the number of its ranks.
        model: where the settings of its model are; None if the role has none of its own.
        engine: the keys of its training engine, by name.
        optim: where the settings of its optimizers are.
    """

    spec: RoleSpec
    ranks: int
    model: str | None
    engine: Mapping[str, str]
    optim: tuple[str, ...]

    @classmethod
    def of(cls, spec: RoleSpec, config: PPOTrainerConfig, ranks: int) -> Self:
        settings = spec.settings_of(config)
        holder = settings if callable(spec.config) else spec.config_of(config)
        return cls(
            spec,
            ranks,
            spec.model_path if isinstance(getattr(holder, "model", None), ModelConfig) else None,
            {name: f"{spec.where}.{group}.{name}" for group, name in _read_by_engine(settings)},
            tuple(f"{spec.where}.{name}" for name, _ in groups_of(settings, OptimConfig)),
        )

    @property
    def computes_logits(self) -> bool:
        update = self.spec.update
        return bool(self.spec.passes) and not (update is not None and update.value_head)

    @property
    def phases(self) -> dict[str, MicroBatches | None]:
        """The phases in which it computes, with the settings that divide rows into micro-batches."""
        phases = (self.spec.update, self.spec.scoring, *self.spec.passes)
        return {phase.phase: phase.batching for phase in phases if phase is not None}


def _read_by_engine(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield the settings that the chosen training engine of a role reads: their group, and their name."""
    if hasattr(settings, "strategy") and groups_of(settings, EngineConfig):
        group = engine_group(settings)
        for field in dataclasses.fields(group_type(TRAIN_ENGINES.settings(settings.strategy))):
            yield group, field.name


def _changes(config: PPOTrainerConfig, fullest: Callable[[], str]) -> Iterator[tuple[str, Any]]:
    """Yield keys of the run's roles with values that save memory, the cheapest first.

    What a model computes counts in its own phases alone, so its keys are left out in others. Those of optimizers, which
    come last, also change the results a little.

    Args:
        fullest: returns the phase that takes the most with the settings that `config` has by then.
    """
    ranks = _ranks(resource_pools(config))
    roles = [_Tunable.of(spec, config, ranks[spec.name]) for spec in active_roles(config)]
    learners = [role for role in roles if role.spec.update is not None]
    frozen = [role for role in roles if role.spec.update is None]

    def of_engines(name: str, roles: Iterable[_Tunable]) -> Iterator[tuple[str, Any]]:
        return ((role.engine[name], True) for role in roles if name in role.engine)

    yield from dict.fromkeys(
        (f"{role.model}.use_fused_kernels", True)
        for role in roles
        if role.model and role.computes_logits and fullest() in role.phases
    )
    for role in roles:
        for phase, limit in role.phases.items():
            if limit is not None and phase == fullest() and hasattr(_value(config, limit.where), limit.tokens):
                yield f"{limit.where}.{limit.tokens}", "a sequence"
    for name, value in _OF_MODELS:
        for role in learners:
            if role.model and role.spec.update is not None and role.spec.update.phase == fullest():
                yield f"{role.model}.{name}", value
    for name in ("sequence_parallel", "use_distributed_optimizer"):
        yield from of_engines(name, learners)
    yield _UTILIZATION, "what is left"
    yield from of_engines("grad_offload", learners)
    yield from of_engines("optimizer_offload", learners)
    yield from of_engines("param_offload", frozen)
    yield from of_engines("param_offload", learners)
    yield from of_engines("offload_policy", (role for role in learners if role.ranks > 1))
    for role in learners:
        if "offload_policy" in role.engine:  # of the engines with 8-bit optimizers alone
            yield from ((where, "8 bits") for where in role.optim)


def _value(config: PPOTrainerConfig, key: str) -> Any:
    """The value at a dotted path. Settings of `roles.<name>` that were not given have their defaults."""
    for spec in ROLES.values():
        if spec.settings is not None and f"{key}.".startswith(f"{spec.where}."):
            return get_key(spec.settings_of(config), key[len(spec.where) + 1 :])
    return get_key(config, key)


def check_before_loading(config: PPOTrainerConfig, policy: RayWorkerGroup) -> RunForecast | None:
    """Tell what a run on GPUs will take of their memory, and refuse one that cannot fit.

    Nothing is done without GPUs: processes share a machine's memory, and nothing reserves a part of it.

    Args:
        policy: its worker group, on whose first rank the forecast is computed.

    Returns:
        The forecast, if there is one.

    Raises:
        PlacementError: it cannot fit; see `refuse_if_too_large`.
    """

    def compute(config: PPOTrainerConfig, ranks: Mapping[str, int]) -> dict[str, Forecast | None]:
        forecasts: dict[str, Forecast | None] = on_first_worker(policy, forecast_roles, config, dict(ranks))
        return forecasts

    return run_forecast.check_group(
        policy,
        lambda total: forecast_run(config, total, compute),
        lambda expected, total: run_forecast.refuse_if_too_large(
            expected, total, lambda: changes_that_fit(config, total, compute)
        ),
    )


def print_forecast(config: PPOTrainerConfig) -> None:
    """The program `hybridrl forecast`: print what a run with these settings takes on this machine's devices.

    Raises:
        PlacementError: it does not fit on this machine's GPUs.
    """
    import_external_lib(config.actor_rollout_ref.model.external_lib)
    config = with_plan(config)
    run_forecast.print_expected(
        lambda total: forecast_run(config, total),
        lambda expected, total: run_forecast.refuse_if_too_large(
            expected, total, lambda: changes_that_fit(config, total)
        ),
        list(resource_pools(config).resource_pool_spec.values()),
    )
