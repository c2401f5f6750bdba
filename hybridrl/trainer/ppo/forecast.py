"""The memory that the phases of a run will take, computed before any model is loaded."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybridrl.config import PPOTrainerConfig
from hybridrl.errors import PlacementError
from hybridrl.notify import notify
from hybridrl.registry import INFERENCE_ENGINES, import_external_lib
from hybridrl.single_controller.ray import RayWorkerGroup
from hybridrl.trainer.ppo.roles import POLICY, ROLES, resource_pools
from hybridrl.utils import device
from hybridrl.workers.forecast import Forecast, forecast_roles

ForRoles = Callable[[PPOTrainerConfig, Mapping[str, int]], dict[str, Forecast | None]]

_GIB = 1024**3
_MIB = 1024**2
_ENGINE_BYTES = 2  # of a parameter in an inference engine: bfloat16
_ACTOR, _MODEL, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
#: changes that save memory, the cheapest first: the key and its value
_CHANGES: tuple[tuple[str, Any], ...] = (
    (f"{_MODEL}.use_fused_kernels", True),
    (f"{_ACTOR}.ppo_max_token_len_per_gpu", "a sequence"),
    (f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", "a sequence"),
    ("critic.ppo_max_token_len_per_gpu", "a sequence"),
    (f"{_MODEL}.enable_gradient_checkpointing", True),
    ("critic.model.enable_gradient_checkpointing", True),
    (f"{_MODEL}.recompute_granularity", "full"),
    ("critic.model.recompute_granularity", "full"),
    (f"{_ROLLOUT}.gpu_memory_utilization", "what is left"),
    (f"{_ACTOR}.fsdp_config.optimizer_offload", True),
    ("actor_rollout_ref.ref.fsdp_config.param_offload", True),
    ("critic.fsdp.optimizer_offload", True),
    (f"{_ACTOR}.fsdp_config.param_offload", True),
    ("critic.fsdp.param_offload", True),
)
_LEAST_UTILIZATION = 0.1


@dataclass(frozen=True, slots=True)
class RunForecast:
    """Bytes per device of each phase.

    Attributes:
        roles: what each model takes; None where its engine cannot tell.
        engine: what the inference engine takes on the policy's devices while it generates.
        sleeping: what it keeps during training.
        receiving: its weights, and the buffers in which new ones are sent to it.
        pools: the pool of each role. Models in one pool share devices.
    """

    roles: Mapping[str, Forecast | None]
    engine: float
    sleeping: float
    receiving: float
    pools: Mapping[str, str]

    def phases(self) -> dict[str, float]:
        """The peak of each phase, on the devices where it runs."""
        found: dict[str, float] = {}
        policy = self.roles.get(POLICY)
        if policy is not None:
            resident = self._resident(POLICY)
            found["gen"] = resident + max(self.engine, policy.weights - policy.kept_weights)
            sent = resident - policy.resident + policy.without_gradients - policy.pass_activations
            found["update_weights"] = sent + max(self.receiving, self.sleeping)
        for name, one in self.roles.items():
            spec = ROLES.get(name)
            if one is None or spec is None:
                continue
            others = self._resident(name) - one.resident + (self.sleeping if self._with_policy(name) else 0)
            for each in spec.passes:
                found[each.phase] = others + one.without_gradients
            if spec.update is not None:
                found[spec.update.phase] = others + one.update
        return found

    def without_tokens(self) -> "RunForecast":
        """The same without what depends on how long sequences are."""
        none = {"activations": 0, "logits": 0, "pass_activations": 0}
        return replace(self, roles={name: one and replace(one, **none) for name, one in self.roles.items()})

    def _resident(self, role: str) -> float:
        """What all models keep on the devices of this role."""
        there = [one for name, one in self.roles.items() if self.pools[name] == self.pools[role]]
        return sum(one.resident for one in there if one is not None)

    def _with_policy(self, role: str) -> bool:
        return self.pools[role] == self.pools.get(POLICY)

    @property
    def peak(self) -> float:
        """The most that any phase takes."""
        return max(self.phases().values(), default=0.0)

    def lines(self, total: float | None) -> list[str]:
        """Describe the forecast, phase by phase and model by model."""
        of = "" if total is None else f" of {total / _GIB:.1f}"
        phases = ", ".join(f"{name} {size / _GIB:.3g}" for name, size in self.phases().items())
        told = [f"memory forecast per device, GiB{of}: {phases or 'none'}"]
        for name, one in self.roles.items():
            if one is None:
                told.append(f"{name}: its training engine has no forecast, so it is not counted")
                continue
            parts = {
                "weights": one.weights,
                "master weights": one.masters,
                "optimizer": one.states,
                "gradients": one.gradients,
                "gathered layers": one.gathered,
                "activations": one.activations,
                "logits": one.logits,
                "pass without gradients": one.pass_activations,
            }
            sizes = ", ".join(f"{what} {size / _GIB:.3g}" for what, size in parts.items() if size)
            told.append(f"{name}: {sizes}; kept between uses {one.resident / _GIB:.3g}")
        return told


def forecast_run(
    config: PPOTrainerConfig, total: float | None = None, compute: ForRoles = forecast_roles
) -> RunForecast:
    """Compute the forecast. It takes the time of a few passes through models without weights.

    Args:
        total: bytes of a GPU, of which an inference engine takes its share; None without GPUs.
        compute: `forecast_roles`, in a process that has a device of the kind that the models will have.
    """
    manager = resource_pools(config)
    ranks = {name: sum(manager.resource_pool_spec[pool]) for name, pool in manager.mapping.items() if name in ROLES}
    rollout = config.actor_rollout_ref.rollout
    shares = rollout.name == "auto" or INFERENCE_ENGINES.facts(rollout.name).reserves_of_total
    engine = 0.0
    if total is not None and shares and not rollout.nnodes:
        engine = rollout.gpu_memory_utilization * total
    roles, receiving = compute(config, ranks), 0.0
    policy = roles.get(POLICY)
    if engine and policy is not None:
        weights = _ENGINE_BYTES * policy.parameters
        buckets = min(weights, 2 * rollout.checkpoint_engine.update_weights_bucket_megabytes * _MIB)
        receiving = weights / rollout.tensor_model_parallel_size + buckets
    return RunForecast(
        roles=roles,
        engine=engine,
        sleeping=0.0 if rollout.free_cache_engine else engine,
        receiving=receiving,
        pools={str(name): str(manager.mapping[name]) for name in ranks},
    )


def refuse_if_too_large(
    config: PPOTrainerConfig, found: RunForecast, total: float, compute: ForRoles = forecast_roles
) -> None:
    """Refuse a run that cannot fit, and warn of one that cannot with sequences of full length.

    Args:
        found: its forecast.
        total: bytes of a device.
        compute: see `forecast_run`.

    Raises:
        PlacementError: a phase takes more than a device has, however short sequences are; the error names the keys
            that would make it fit.
    """
    phases = found.phases()
    phase = max(phases, key=lambda name: phases[name], default=None)
    if phase is None or phases[phase] <= total:
        return
    changes, fits = changes_that_fit(config, total, compute)
    remedy = "Set " + " ".join(f"{key}={value}" for key, value in changes) if changes else ""
    if not fits:
        remedy = f"{remedy}. That alone is not enough: use" if remedy else "Use"
        remedy += " more devices (trainer.n_gpus_per_node, trainer.nnodes), shorter sequences or a smaller model"
    problem = (
        f"the phase {phase} needs {phases[phase] / _GIB:.3g} GiB per device, which has {total / _GIB:.3g}. {remedy}. "
        "hybridrl forecast prints every part for the same settings"
    )
    if found.without_tokens().peak > total:
        raise PlacementError(problem)
    notify(f"with sequences of full length, {problem}", "warning")


def changes_that_fit(
    config: PPOTrainerConfig, total: float, compute: ForRoles = forecast_roles
) -> tuple[list[tuple[str, Any]], bool]:
    """Return settings that lower the peak, the cheapest first, as few as are needed, and whether they suffice."""
    tried = copy.deepcopy(config)
    peak, chosen = forecast_run(tried, total, compute).peak, []
    for key, value in _candidates(tried, total, compute):
        if peak <= total:
            break
        before = _get(tried, key)
        _set(tried, key, value)
        lower = forecast_run(tried, total, compute).peak
        if lower < 0.99 * peak:
            chosen.append((key, value))
            peak = lower
        else:
            _set(tried, key, before)
    return chosen, peak <= total


def _candidates(config: PPOTrainerConfig, total: float, compute: ForRoles) -> Iterator[tuple[str, Any]]:
    rollout = config.actor_rollout_ref.rollout
    sequence = rollout.prompt_length + rollout.response_length
    for key, value in _CHANGES:
        if key.startswith("critic.") and not config.use_critic:
            continue
        if value == "a sequence":
            if _get(config, key) > sequence:
                yield key, sequence
        elif value == "what is left":
            found = forecast_run(config, total, compute)
            left = (total - found.phases().get("gen", 0.0) + found.engine) / total
            fitting = math.floor(100 * left) / 100
            if _LEAST_UTILIZATION <= fitting < _get(config, key):
                yield key, fitting
        elif _get(config, key) != value:
            yield key, value


def _get(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _set(config: Any, key: str, value: Any) -> None:
    where, _, name = key.rpartition(".")
    setattr(_get(config, where), name, value)


def check_before_loading(config: PPOTrainerConfig, policy: RayWorkerGroup) -> None:
    """Tell what a run on GPUs will take of their memory, and refuse one that cannot fit.

    Nothing is done without GPUs: processes share a machine's memory, and nothing reserves a part of it.

    Args:
        policy: its worker group, on whose first rank the forecast is computed.

    Raises:
        PlacementError: it cannot fit; see `refuse_if_too_large`.
    """
    if not getattr(policy.resource_pool, "use_gpu", False):
        return

    def compute(config: PPOTrainerConfig, ranks: Mapping[str, int]) -> dict[str, Forecast | None]:
        found: dict[str, Forecast | None] = policy.execute_rank_zero_sync("forecast_roles", config, dict(ranks))
        return found

    try:
        total = min(fact["total_gb"] for fact in policy.device_memory()) * _GIB
        found = forecast_run(config, total, compute)
    except Exception as error:  # a model that cannot be computed without weights can still be trained
        notify(f"there is no forecast of memory: {type(error).__name__}: {error}")
        return
    for line in found.lines(total):
        notify(line)
    refuse_if_too_large(config, found, total, compute)


def print_forecast(config: PPOTrainerConfig) -> None:
    """The program `hybridrl forecast`: print what a run with these settings takes on this machine's devices.

    Raises:
        PlacementError: it does not fit on this machine's GPUs.
    """
    import_external_lib(config.actor_rollout_ref.model.external_lib)
    total = device.memory_stats()["total_gb"] * _GIB
    on_gpu = device.is_gpu()
    found = forecast_run(config, total if on_gpu else None)
    print("\n".join(found.lines(total if on_gpu else None)))
    if on_gpu:
        refuse_if_too_large(config, found, total)
    else:
        processes = sum(next(iter(resource_pools(config).resource_pool_spec.values())))
        if found.peak * processes > total:
            notify(
                f"{processes} processes with {found.peak / _GIB:.1f} GiB each need more than this machine has, "
                f"{total / _GIB:.1f} GiB; lower trainer.n_gpus_per_node, or train on GPUs",
                "warning",
            )
