"""The memory that the phases of a run will take, computed before any model is loaded."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config import PPOTrainerConfig
from hybridrl.config.served import ServedModel
from hybridrl.config.unread import unread_by
from hybridrl.registry import INFERENCE_ENGINES, import_external_lib
from hybridrl.single_controller.ray import RayWorkerGroup, ResourcePoolManager
from hybridrl.trainer import forecast as shared
from hybridrl.trainer.forecast import MemoryForecast, get_key
from hybridrl.trainer.ppo.roles import POLICY, ROLES, active_roles, resource_pools
from hybridrl.workers.forecast import Forecast, forecast_roles

ForRoles = Callable[[PPOTrainerConfig, Mapping[str, int]], dict[str, Forecast | None]]

_MIB = 1024**2
_ENGINE_BYTES = 2  # of a parameter in an inference engine: bfloat16
_ACTOR, _MODEL, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
#: changes that save memory, the cheapest first: the key and its value. The last one also changes the results a little.
_CHANGES: tuple[tuple[str, Any], ...] = (
    (f"{_MODEL}.use_fused_kernels", True),
    (f"{_ACTOR}.ppo_max_token_len_per_gpu", "a sequence"),
    (f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", "a sequence"),
    ("critic.ppo_max_token_len_per_gpu", "a sequence"),
    ("reward.reward_model.forward_max_token_len_per_gpu", "a sequence"),
    (f"{_MODEL}.enable_gradient_checkpointing", True),
    ("critic.model.enable_gradient_checkpointing", True),
    (f"{_MODEL}.recompute_granularity", "full"),
    ("critic.model.recompute_granularity", "full"),
    (f"{_MODEL}.enable_activation_offload", True),
    ("critic.model.enable_activation_offload", True),
    (f"{_MODEL}.tiled_mlp.enabled", True),
    ("critic.model.tiled_mlp.enabled", True),
    (f"{_ACTOR}.megatron.sequence_parallel", True),
    ("critic.megatron.sequence_parallel", True),
    (f"{_ACTOR}.megatron.use_distributed_optimizer", True),
    ("critic.megatron.use_distributed_optimizer", True),
    (f"{_ROLLOUT}.gpu_memory_utilization", "what is left"),
    (f"{_ACTOR}.megatron.grad_offload", True),
    ("critic.megatron.grad_offload", True),
    (f"{_ACTOR}.fsdp_config.optimizer_offload", True),
    (f"{_ACTOR}.megatron.optimizer_offload", True),
    *(
        (f"{role}.{group}.param_offload", True)
        for role in ("actor_rollout_ref.ref", "distillation", "reward.reward_model")
        for group in ("fsdp_config", "megatron")
    ),
    ("critic.fsdp.optimizer_offload", True),
    ("critic.megatron.optimizer_offload", True),
    (f"{_ACTOR}.fsdp_config.param_offload", True),
    (f"{_ACTOR}.megatron.param_offload", True),
    ("critic.fsdp.param_offload", True),
    ("critic.megatron.param_offload", True),
    (f"{_ACTOR}.fsdp_config.offload_policy", "several ranks"),
    ("critic.fsdp.offload_policy", "several ranks"),
    (f"{_ACTOR}.optim", "8 bits"),
    ("critic.optim", "8 bits"),
)
#: a setting that only an engine with 8-bit optimizers reads, by the key of the optimizer's settings
_EIGHT_BIT = {f"{_ACTOR}.optim": f"{_ACTOR}.fsdp_config.offload_policy", "critic.optim": "critic.fsdp.offload_policy"}
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
        found: dict[str, float] = {}
        policy = self.roles.get(POLICY)
        if policy is not None:
            resident = self._resident(POLICY)
            found["gen"] = resident + max(self.engine, policy.weights - policy.kept_weights)
            sent = resident - policy.resident + policy.without_gradients - policy.pass_activations
            found["update_weights"] = sent + max(self.receiving, self.sleeping)
        found |= self._served_phases()
        for name, one in self.roles.items():
            spec = ROLES.get(name)
            if one is None or spec is None:
                continue
            others = self._resident(name) - one.resident + (self.sleeping if self._with_policy(name) else 0)
            if spec.scoring is not None:  # an engine on the same devices keeps its weights meanwhile
                engine = max(self.receiving, self.sleeping) if self._with_policy(name) else 0.0
                found[spec.scoring.phase] = self._resident(name) - one.resident + engine + one.without_gradients
            for each in spec.passes:
                found[each.phase] = others + one.without_gradients
            if spec.update is not None:
                found[spec.update.phase] = others + one.update
        return found

    def _served_phases(self) -> dict[str, float]:
        """The peaks while the engines of served roles read."""
        found: dict[str, float] = {}
        for name, taken in self.served.items():
            spec = ROLES[name]
            peak = self._resident(name) - self.idle[name] + max(taken, self.idle[name])
            phase = spec.asked_in if spec.scoring is None else spec.scoring.phase
            if phase:
                beside = max(self.receiving, self.sleeping) if self._with_policy(name) else 0.0
                found[phase] = peak + beside
            for each in spec.passes:
                found[each.phase] = peak + (self.sleeping if self._with_policy(name) else 0.0)
        return found

    def _resident(self, role: str) -> float:
        """What all models keep on the devices of this role."""
        there = [one for name, one in self.roles.items() if self.pools[name] == self.pools[role]]
        engines = sum(kept for name, kept in self.idle.items() if self.pools[name] == self.pools[role])
        return engines + sum(one.resident for one in there if one is not None)

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
    shares = rollout.name == "auto" or INFERENCE_ENGINES.facts(rollout.name).reserves_of_total
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
        served={name: max(_taken(models, total)) for name, models in served.items()},
        idle={
            name: sum(
                0.0 if model.rollout.free_cache_engine else taken
                for model, taken in zip(models, _taken(models, total), strict=True)
            )
            for name, models in served.items()
        },
    )


def _ranks(manager: ResourcePoolManager) -> dict[str, int]:
    """The number of ranks of each role."""
    return {str(name): sum(manager.resource_pool_spec[pool]) for name, pool in manager.mapping.items() if name in ROLES}


def _taken(models: Sequence[ServedModel], total: float | None) -> list[float]:
    """Bytes that the engine of each model takes of a device."""
    return [0.0 if total is None else model.rollout.gpu_memory_utilization * total for model in models]


def _chosen_engine(config: PPOTrainerConfig, role: str) -> str:
    strategy = getattr(ROLES[role].settings_of(config), "strategy", None)
    return "its worker" if strategy is None else f"{ROLES[role].where}.strategy={strategy}"


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
    shared.refuse_if_too_large(found, total, lambda: changes_that_fit(config, total, compute))


def changes_that_fit(
    config: PPOTrainerConfig, total: float, compute: ForRoles = forecast_roles
) -> tuple[list[tuple[str, Any]], bool]:
    """Return settings that lower the peak, the cheapest first, as few as are needed, and whether they suffice."""
    return shared.fewest_changes(
        config,
        total,
        lambda tried: forecast_run(tried, total, compute).peak,
        lambda tried: _candidates(tried, total, compute),
    )


def _candidates(config: PPOTrainerConfig, total: float, compute: ForRoles) -> Iterator[dict[str, Any]]:
    rollout, ranks = config.actor_rollout_ref.rollout, _ranks(resource_pools(config))
    sequence = rollout.prompt_length + rollout.response_length
    idle = tuple(f"{spec.where}." for spec in ROLES.values() if not spec.needed(config))
    for key, value in _CHANGES:
        if key.startswith(idle) or unread_by(config, _EIGHT_BIT.get(key, key)):
            continue
        if value == "a sequence":
            if get_key(config, key) > sequence:
                yield {key: sequence}
        elif value == "what is left":
            found = forecast_run(config, total, compute)
            left = (total - found.phases().get("gen", 0.0) + found.engine) / total
            fitting = math.floor(100 * left) / 100
            if _LEAST_UTILIZATION <= fitting < get_key(config, key):
                yield {key: fitting}
        elif value == "several ranks":
            if ranks["critic" if key.startswith("critic.") else POLICY] > 1 and not get_key(config, key):
                yield {key: True}
        elif value == "8 bits":
            if settings := shared.eight_bit_adam(key, get_key(config, key)):
                yield settings
        elif get_key(config, key) != value:
            yield {key: value}


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
        found: dict[str, Forecast | None] = shared.asked(policy, "forecast_roles", config, dict(ranks))
        return found

    return shared.check_group(
        policy,
        lambda total: forecast_run(config, total, compute),
        lambda found, total: shared.refuse_if_too_large(found, total, lambda: changes_that_fit(config, total, compute)),
    )


def print_forecast(config: PPOTrainerConfig) -> None:
    """The program `hybridrl forecast`: print what a run with these settings takes on this machine's devices.

    Raises:
        PlacementError: it does not fit on this machine's GPUs.
    """
    import_external_lib(config.actor_rollout_ref.model.external_lib)
    shared.print_found(
        lambda total: forecast_run(config, total),
        lambda found, total: shared.refuse_if_too_large(found, total, lambda: changes_that_fit(config, total)),
        list(resource_pools(config).resource_pool_spec.values()),
    )
