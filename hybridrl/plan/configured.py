"""The plan that the settings of a run describe: its placement, layouts and replicas as they are, with predictions."""

from typing import Any

from hybridrl.config import PPOTrainerConfig
from hybridrl.config.dotted import get_key
from hybridrl.config.roles import ROLES, MicroBatches, pool_of, pools_of
from hybridrl.errors import PlacementError
from hybridrl.plan.factors import FITTED
from hybridrl.plan.layout_options import Replicas
from hybridrl.plan.run_plan import (
    ACTOR,
    CRITIC,
    PLACES,
    REF,
    REWARD,
    ROLLOUT,
    PlanRequest,
    RunPlan,
    is_sharded,
    predicted,
)
from hybridrl.plan.seconds import CostFactors, TrainingLayout

#: the names that the table of roles has for the roles of a plan
SPECS = {ACTOR: "actor_rollout", REF: "ref", CRITIC: "critic", REWARD: "reward_model"}
_MEGATRON = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
}


def configured_plan(request: PlanRequest, factors: CostFactors = FITTED) -> RunPlan:
    """Return the plan that the settings of a run are.

    Raises:
        ConfigError: a training engine for which nothing is predicted.
        PlacementError: the settings need more devices than there are.
    """
    config = request.config
    sharded = is_sharded("actor_rollout_ref.actor.strategy", config.actor_rollout_ref.actor.strategy)
    sets = _sets(request)
    needed, cluster = sum(size for _, size in sets), request.cluster
    if needed > cluster.count:
        raise PlacementError(
            f"trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node={config.trainer.n_gpus_per_node} with "
            f"other pools are {needed} devices, and devices={cluster.count}x{cluster.device.name}; lower them, or set "
            "devices= to what there is"
        )
    sizes = {role: size for roles, size in sets for role in roles}
    layouts = {role: layout_of(config, role, sizes[role], sharded) for role in request.roles if role != ROLLOUT}
    rollout = config.actor_rollout_ref.rollout
    devices = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size
    replicas = Replicas(devices, rollout.gpu_memory_utilization, rollout.max_num_seqs)
    return predicted(request, factors, sharded, sets, layouts, replicas)


def _sets(request: PlanRequest) -> tuple[tuple[tuple[str, ...], int], ...]:
    """The roles of each pool, and its devices."""
    config, rollout = request.config, request.config.actor_rollout_ref.rollout
    pools, of_pool = pools_of(config), dict[str, list[str]]()
    for role in request.roles:
        if role == ROLLOUT:
            continue
        pool = pool_of(ROLES[SPECS[role]], config)
        if pool is None:
            raise PlacementError(f"placement.roles.{SPECS[role]} is missing; name the pool in which it runs")
        of_pool.setdefault(pool, []).append(role)
        if role == ACTOR and not rollout.nnodes:
            of_pool[pool].append(ROLLOUT)
    sets = [(tuple(roles), sum(pools[pool])) for pool, roles in of_pool.items()]
    if rollout.nnodes:
        sets.append(((ROLLOUT,), rollout.nnodes * rollout.n_gpus_per_node))
    return tuple(sets)


def layout_of(config: PPOTrainerConfig, role: str, n: int, sharded: bool) -> TrainingLayout:
    """Return the layout of a role on n devices."""
    where, group, model = PLACES[role]
    trains, longest = role in (ACTOR, CRITIC), config.data.max_prompt_length + config.data.max_response_length
    batching: MicroBatches | None = MicroBatches(where)
    if role == REF:
        batching = ROLES[SPECS[REF]].passes[0].batching
    elif role == REWARD:
        scoring = ROLES[SPECS[REWARD]].scoring
        batching = scoring.batching if scoring is not None else None
    engine = get_key(config, f"{where}.{group if sharded else 'megatron'}")
    fields = engine_fields(engine, n, sharded, trains)
    if trains:
        switches = get_key(config, model)
        fields |= {"recompute": int(switches.enable_gradient_checkpointing), "fused": int(switches.use_fused_kernels)}
    tokens = longest if batching is None else micro_tokens(get_key(config, batching.where), batching, longest)
    return TrainingLayout(sharded, micro_tokens=tokens, **fields)


def micro_tokens(settings: Any, batching: MicroBatches, longest: int) -> int:
    """Tokens of the largest micro-batch of a device."""
    if getattr(settings, batching.dynamic, False):
        return int(getattr(settings, batching.tokens))
    return int(getattr(settings, batching.size) or 1) * longest


def engine_fields(engine: Any, n: int, sharded: bool, trains: bool) -> dict[str, int]:
    """The fields of a layout that the settings of a training engine decide."""
    if sharded:
        shards = engine.fsdp_size if engine.fsdp_size > 0 else n
        fields = {"context": engine.ulysses_sequence_parallel_size, "shards": min(shards, n)}
        fields["expert"] = engine.expert_parallel_size
    else:
        fields = {name: getattr(engine, key) for name, key in _MEGATRON.items()}
    optimizer = getattr(engine, "optimizer_offload", False)
    fields["offload"] = 2 if engine.param_offload and (optimizer or not trains) else int(optimizer)
    return fields
