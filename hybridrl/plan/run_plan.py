"""Plans of a run: what its settings ask for, the search, and the plans in the order in which they are proposed."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridrl.config import PPOTrainerConfig
from hybridrl.config.dotted import get_key
from hybridrl.errors import ConfigError, PlacementError
from hybridrl.plan.devices import Cluster
from hybridrl.plan.expert_groups import divides_experts
from hybridrl.plan.factors import FITTED, STEP_ERROR
from hybridrl.plan.layout_options import (
    GeneratingRole,
    Replicas,
    TrainedRole,
    device_budget,
    replica_options,
    trained_options,
)
from hybridrl.plan.model_bytes import model_memory
from hybridrl.plan.search import MappingProblem, Placement, RunOption, search
from hybridrl.plan.seconds import CostFactors, StepSize, TrainingLayout, generation, refit, training
from hybridrl.plan.shapes import ModelShape, read_shape
from hybridrl.registry import INFERENCE_ENGINES, MEGATRON_FAMILIES, has_replicas

ACTOR, ROLLOUT, REF, CRITIC, REWARD = "actor", "rollout", "ref", "critic", "reward_model"
#: where the settings of a role are, and the group of FSDP2
PLACES = {
    ACTOR: ("actor_rollout_ref.actor", "fsdp_config", "actor_rollout_ref.model"),
    REF: ("actor_rollout_ref.ref", "fsdp_config", "actor_rollout_ref.model"),
    CRITIC: ("critic", "fsdp", "critic.model"),
    REWARD: ("reward.reward_model", "fsdp_config", "reward.reward_model.model"),
}
_MEGATRON_FIELDS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
}
SHARDED_FIELDS = {
    "context": "ulysses_sequence_parallel_size",
    "shards": "fsdp_size",
    "expert": "expert_parallel_size",
}
_SLACK = 0.03
_HALF = 0.5  # of the longest prompt and response: the mean lengths, where the user gives none
_EXACT = 40  # devices up to which options that are nearly the same are kept


@dataclass(frozen=True)
class PlanRequest:
    """A run to plan.

    Attributes:
        config: the settings; `config.set_keys` are constraints.
        cluster: the devices.
        step: the batch of a step.
        models: the shape of each role's model.
        assumed: what the request assumes, in words.
    """

    config: PPOTrainerConfig
    cluster: Cluster
    step: StepSize
    models: Mapping[str, ModelShape]
    assumed: tuple[str, ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the run."""
        return tuple(self.models)


@dataclass(frozen=True)
class RunPlan:
    """A plan, with what it is predicted to take.

    Attributes:
        sharded: trained with FSDP2; otherwise with Megatron-core.
        sets: roles that share devices, with the number of devices.
        layouts: layout of each role that a training engine computes.
        replicas: how engines generate.
        seconds: of each phase, predicted.
        memory: bytes per device of each phase, predicted.
    """

    sharded: bool
    sets: tuple[tuple[tuple[str, ...], int], ...]
    layouts: Mapping[str, TrainingLayout]
    replicas: Replicas
    seconds: Mapping[str, float]
    memory: Mapping[str, float]

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.seconds["step"]

    @property
    def complexity(self) -> int:
        """The number of sets, and one for an engine other than the default: ties are listed by it."""
        return len(self.sets) + (not self.sharded)

    def devices_of(self, role: str) -> int:
        """Number of devices of a role's set."""
        return next(size for roles, size in self.sets if role in roles)


def request_for(config: PPOTrainerConfig, cluster: Cluster) -> PlanRequest:
    """Return what a run with these settings asks for.

    Mean lengths are `placement.response` and `placement.prompt`, or half of the longest, which is said in `assumed`.

    Raises:
        ModelError: a model's config.json cannot be read.
        PlacementError: settings name devices that are not those of the cluster.
        ConfigError: the run has something that no plan is made for.
    """
    request = described_run(config, cluster)
    reward = config.reward.reward_model
    if REWARD in request.roles and reward.own_pool:
        raise ConfigError(
            "reward.reward_model.enable_resource_pool=True: a plan places the reward model itself; leave it out"
        )
    _check_devices(request)
    return request


def described_run(config: PPOTrainerConfig, cluster: Cluster) -> PlanRequest:
    """Return the models and the batch of a run, whatever its devices are.

    Raises:
        ModelError: a model's config.json cannot be read.
        ConfigError: the run has something that is not predicted.
    """
    policy = config.actor_rollout_ref
    if INFERENCE_ENGINES.knows(policy.rollout.name) and not has_replicas(policy.rollout.name):
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={policy.rollout.name}: plans are made for engines with replicas; leave it "
            f"out, or set one of {', '.join(filter(has_replicas, INFERENCE_ENGINES.names()))}"
        )
    if config.trainer.v1.trainer_mode != "sync":
        raise ConfigError(
            f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}: plans are made for synchronous runs; leave it "
            "out, and compare schedules with hybridrl simulate"
        )
    if policy.model.adapted or config.distillation.enabled:
        key = "distillation.enabled=True" if config.distillation.enabled else "actor_rollout_ref.model.lora_rank"
        raise ConfigError(f"{key}: a plan knows neither adapters nor teachers yet; leave it out, or use forecast")
    step, assumed = _step_of(config)
    own = read_shape(policy.model.path)
    models = {ACTOR: own, ROLLOUT: own}
    if config.has_reference_model:
        models[REF] = own
    if config.use_critic:
        models[CRITIC] = read_shape(config.critic.model.path or policy.model.path)
    reward = config.reward.reward_model
    if reward.enable and not reward.is_judge:
        models[REWARD] = read_shape(reward.model.path)
    return PlanRequest(config, cluster, step, models, assumed)


def _step_of(config: PPOTrainerConfig) -> tuple[StepSize, tuple[str, ...]]:
    """The batch of a step, and what is assumed of its lengths."""
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    longest = data.max_prompt_length + data.max_response_length
    means = {
        "response": (config.placement.response, data.max_response_length),
        "prompt": (config.placement.prompt, data.max_prompt_length),
    }
    assumed = []
    for name, (mean, most) in means.items():
        if mean is None:
            assumed.append(f"a mean {name} of {most * _HALF:g} tokens, half of the longest ({name}=MEAN states it)")
        elif not 0 < mean <= most:
            raise ConfigError(f"{name}={mean:g}: the mean is more than 0 and at most data.max_{name}_length={most}")
    mean_response, mean_prompt = (most * _HALF if mean is None else mean for mean, most in means.values())
    updates = max(1, data.train_batch_size // actor.ppo_mini_batch_size) * actor.ppo_epochs
    samples = data.train_batch_size * rollout.n
    step = StepSize(samples, rollout.n, mean_prompt, mean_response, data.max_response_length, updates, longest)
    return step, tuple(assumed)


def _check_devices(request: PlanRequest) -> None:
    """Refuse settings of devices that contradict `devices=`."""
    config, cluster = request.config, request.cluster
    values = {"trainer.n_gpus_per_node": min(cluster.machine, cluster.count), "trainer.nnodes": cluster.machines}
    for key, value in values.items():
        if key in config.set_keys and get_key(config, key) != value and not config.actor_rollout_ref.rollout.nnodes:
            raise PlacementError(
                f"{key}={get_key(config, key)}, and devices={cluster.count}x{cluster.device.name} in machines of "
                f"{cluster.machine} are {value}; leave {key} out, or set devices= and machine= to what there is"
            )
    if list(config.placement.pools) != ["global"]:
        raise PlacementError(
            f"placement.pools={config.placement.pools}: a plan chooses the pools itself; leave placement out"
        )


def plans(request: PlanRequest, factors: CostFactors = FITTED, within: float = 1.0) -> list[RunPlan]:
    """Return plans, the best of each placement and engine, in the order in which they are proposed.

    Those within the published error of the fastest are ties, and the simplest of them is first.

    Args:
        within: plans that take more than (1 + within) times the fastest are left out.
    """
    results = [
        _plan_of(request, factors, sharded, placement)
        for sharded in _engines(request)
        for placement in search(_problem(request, factors, sharded), within)
    ]
    if not results:
        return []
    fastest = min(plan.step_s for plan in results)
    results = [plan for plan in results if plan.step_s <= (1 + within) * fastest]

    def rank(plan: RunPlan) -> tuple[bool, float, float]:
        tied = is_tie(plan, fastest)
        return not tied, plan.complexity if tied else plan.step_s, plan.step_s

    return sorted(results, key=rank)


def why_none_fits(request: PlanRequest) -> str:
    """Return why there is no plan, with the number of devices for which there is one."""
    cluster = request.cluster
    least = next(
        (
            larger.count
            for factor in (2, 4, 8, 16, 32)
            if plans(replace(request, cluster=(larger := replace(cluster, count=cluster.count * factor))))
        ),
        None,
    )
    remedy = f"devices={least}x{cluster.device.name} is enough" if least else "more devices alone are not enough"
    return (
        f"devices={cluster.count}x{cluster.device.name}: no layout of {', '.join(request.roles)} fits, with the "
        f"settings that are given; {remedy}. Shorter data.max_response_length, or fewer given settings, need less"
    )


def is_tie(plan: RunPlan, fastest: float) -> bool:
    """Whether a plan takes no more than the fastest one, as far as the published error tells."""
    return plan.step_s <= (1 + STEP_ERROR) * fastest


def is_sharded(key: str, strategy: str) -> bool:
    """Whether a training engine is FSDP2 and not Megatron-core.

    Raises:
        ConfigError: it is neither, and nothing is predicted for it.
    """
    if strategy not in ("fsdp2", "megatron"):
        raise ConfigError(f"{key}={strategy}: plans and predictions are made for fsdp2 and megatron")
    return strategy == "fsdp2"


def _engines(request: PlanRequest) -> list[bool]:
    """Whether FSDP2 (True) and Megatron-core (False) are candidates."""
    config, sharded = request.config, []
    keys = {"actor_rollout_ref.actor.strategy", "model_engine"} & config.set_keys
    families = {model.family for model in request.models.values()}
    strategy = config.actor_rollout_ref.actor.strategy
    if keys:
        return [is_sharded("actor_rollout_ref.actor.strategy", strategy)]
    sharded.append(True)
    if all(map(MEGATRON_FAMILIES.knows, families)):
        sharded.append(False)
    return sharded


def _problem(request: PlanRequest, factors: CostFactors, sharded: bool) -> MappingProblem:
    cluster, config = request.cluster, request.config
    rollout, slack = config.actor_rollout_ref.rollout, 0.0 if cluster.count <= _EXACT else _SLACK
    per_node = "actor_rollout_ref.rollout.n_gpus_per_node"
    apart = rollout.nnodes * (rollout.n_gpus_per_node if per_node in config.set_keys else cluster.machine)
    stated = "actor_rollout_ref.rollout.nnodes" in config.set_keys

    @functools.cache
    def options(role: str, n: int) -> list[RunOption]:
        if role != ROLLOUT:
            return trained_options(trained_role(request, role, sharded), cluster, factors, n, sharded, slack)
        if stated and apart and n != apart:
            return []
        return replica_options(_generating_role(request), cluster, factors, n, slack)

    def allowed(roles: Sequence[str]) -> bool:
        if ROLLOUT not in roles:
            return ACTOR not in roles or not (stated and not apart)
        together = ACTOR in roles
        return (together or len(roles) == 1) and not (stated and together == bool(apart))

    sizes = tuple(sorted({*cluster.sizes, *([apart] if apart else [])}))
    return MappingProblem(request.roles, options, sizes, cluster.count, device_budget(cluster), allowed, slack)


def trained_role(request: PlanRequest, role: str, sharded: bool) -> TrainedRole:
    """Return the work of a role in a step, with what the user fixed."""
    config, actor = request.config, request.config.actor_rollout_ref.actor
    trains = role in (ACTOR, CRITIC)
    again = request.step.updates > 1 or actor.recompute_old_log_prob == "always"
    passes = int(again) if role == ACTOR else 1
    fixed = _fixed(config, role, sharded, trains)
    divided = sharded and "expert" not in fixed and _divides_experts(request, role)
    return TrainedRole(request.models[role], passes, request.step, trains, fixed, divided)


def _divides_experts(request: PlanRequest, role: str) -> bool:
    """Whether a plan may divide the experts of a role trained with FSDP2. A reward model stays as its settings are."""
    if not request.models[role].experts or role == REWARD:
        return False
    where, group, name = PLACES[role]
    own, policy = get_key(request.config, name), request.config.actor_rollout_ref.model
    optim = get_key(request.config, f"{where}.optim") if role in (ACTOR, CRITIC) else None
    engine = get_key(request.config, f"{where}.{group}")
    return divides_experts(own.path or policy.path, own.trust_remote_code, engine, optim)


def _fixed(config: PPOTrainerConfig, role: str, sharded: bool, trains: bool) -> dict[str, list[int]]:
    """The fields of a layout that keys of the user decide."""
    where, group, model = PLACES[role]
    group = f"{where}.{group if sharded else 'megatron'}"
    fixed: dict[str, list[int]] = {}
    for name, key in (SHARDED_FIELDS if sharded else _MEGATRON_FIELDS).items():
        if f"{group}.{key}" in config.set_keys:
            fixed[name] = [int(get_key(config, f"{group}.{key}"))]
    if trains:
        switches = {"recompute": f"{model}.enable_gradient_checkpointing", "fused": f"{model}.use_fused_kernels"}
        fixed |= {name: [int(get_key(config, key))] for name, key in switches.items() if key in config.set_keys}
        tokens = f"{where}.ppo_max_token_len_per_gpu"
        if tokens in config.set_keys:
            fixed["micro_tokens"] = [int(get_key(config, tokens))]
        elif f"{where}.use_dynamic_bsz" in config.set_keys and not get_key(config, f"{where}.use_dynamic_bsz"):
            rows = int(get_key(config, f"{where}.ppo_micro_batch_size_per_gpu"))
            longest = config.data.max_prompt_length + config.data.max_response_length
            fixed["micro_tokens"] = [rows * longest]
    offloaded = {name: bool(get_key(config, f"{group}.{name}_offload")) for name in ("param", "optimizer")}
    stated = [name for name in offloaded if f"{group}.{name}_offload" in config.set_keys]
    if stated:
        levels = {0: (False, False), 1: (False, True), 2: (True, True)}
        position = {"param": 0, "optimizer": 1}
        fixed["offload"] = [
            level
            for level, pair in levels.items()
            if all(pair[position[name]] == offloaded[name] for name in stated if trains or name == "param")
        ]
    return fixed


def _generating_role(request: PlanRequest) -> GeneratingRole:
    rollout, where = request.config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout."
    values: dict[str, Any] = {
        "tensor": ("tensor_model_parallel_size", rollout.tensor_model_parallel_size),
        "share": ("gpu_memory_utilization", rollout.gpu_memory_utilization),
        "capacity": ("max_num_seqs", rollout.max_num_seqs),
    }
    limits = {name: [value] for name, (key, value) in values.items() if where + key in request.config.set_keys}
    return GeneratingRole(request.models[ROLLOUT], request.step, **limits)


def _plan_of(request: PlanRequest, factors: CostFactors, sharded: bool, placement: Placement) -> RunPlan:
    """The plan of a placement, with its seconds without the search's preference for defaults."""
    options = {role: option.how for _, _, used in placement.sets for role, option in used.how}
    replicas: Replicas = options.pop(ROLLOUT)
    sets = tuple((roles, size) for roles, size, _ in placement.sets)
    return predicted(request, factors, sharded, sets, options, replicas)


def predicted(
    request: PlanRequest,
    factors: CostFactors,
    sharded: bool,
    sets: tuple[tuple[tuple[str, ...], int], ...],
    layouts: Mapping[str, TrainingLayout],
    replicas: Replicas,
) -> RunPlan:
    """Return a plan with its seconds and bytes; the arguments are the fields of `RunPlan`."""
    device, step, policy = request.cluster.device, request.step, request.models[ROLLOUT]
    sizes = {role: size for roles, size in sets for role in roles}
    n = sizes[ROLLOUT]
    works = {role: trained_role(request, role, sharded) for role in layouts}
    terms = {
        role: model_memory(work.model, sizes[role], layouts[role], step, work.trains) for role, work in works.items()
    }
    phases = {"gen": generation(policy, device, factors, n, replicas.tensor, step, replicas.share, replicas.capacity)}
    phases["weights"] = refit(policy, factors)
    memory: dict[str, float] = {}

    def others(role: str) -> float:
        neighbours = next(roles for roles, _ in sets if role in roles)
        return sum(float(terms[other].resident) for other in neighbours if other not in (role, ROLLOUT))

    memory["gen"] = others(ROLLOUT) + replicas.share * device.memory_gb * 1e9
    of_set: list[dict[str, float]] = []
    for roles, _ in sets:
        stages = {"preparation": 0.0, "update": 0.0}
        for role in roles:
            if role == ROLLOUT:
                continue
            layout, work = layouts[role], works[role]
            values = {
                _pass_name(role): work.passes
                * float(training(work.model, device, factors, sizes[role], layout, step, False))
            }
            stages["preparation"] += values[_pass_name(role)]
            if work.trains:
                phase = f"update_{role}"
                values[phase] = float(training(work.model, device, factors, sizes[role], layout, step, True))
                stages["update"] += values[phase]
                memory[phase] = float(terms[role].update) + others(role)
            if values[_pass_name(role)]:
                memory[_pass_name(role)] = float(terms[role].pass_peak) + others(role)
            phases |= {name: value for name, value in values.items() if value}
        of_set.append(stages)
    slowest = sum(max(stages[name] for stages in of_set) for name in ("preparation", "update"))
    phases["rest"] = factors.fixed_s
    phases["step"] = phases["gen"] + phases["weights"] + slowest + factors.fixed_s
    return RunPlan(sharded, sets, layouts, replicas, phases, memory)


def _pass_name(role: str) -> str:
    return {ACTOR: "old_log_prob", CRITIC: "values"}.get(role, role)
