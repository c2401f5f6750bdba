"""A plan in the words of the run."""

from hybridrl.plan.run_plan import ACTOR, CRITIC, PLACES, REF, REWARD, ROLLOUT, SHARDED_FIELDS, PlanRequest, RunPlan
from hybridrl.plan.seconds import TrainingLayout

_ENGINE = "vllm"  # replicas with machines of their own need a name other than auto
_POOL_NAMES = {ACTOR: "policy", CRITIC: "value", REF: "reference", REWARD: "reward"}
_KEYS_OF_PLACEMENT = {ACTOR: "actor_rollout_ref", CRITIC: "critic", REF: "ref", REWARD: "reward_model"}


def overrides(request: PlanRequest, plan: RunPlan) -> dict[str, str]:
    """Return the settings of a plan that the user has not given, by key.

    Defaults are left out, but for devices, micro-batches and generation, which are always named.
    """
    words = {**_devices(request, plan), **_generation(request, plan)}
    for role, layout in plan.layouts.items():
        if role != REWARD:
            words |= _role(request, plan, role, layout)
    return {key: value for key, value in words.items() if key not in request.config.set_keys}


def _devices(request: PlanRequest, plan: RunPlan) -> dict[str, str]:
    cluster = request.cluster
    sets = [(tuple(role for role in roles if role != ROLLOUT), size) for roles, size in plan.sets]
    sets = [(roles, size) for roles, size in sets if roles]
    words = {}
    if len(sets) == 1:
        shape = cluster.shape_of(sets[0][1])
        words["trainer.nnodes"], words["trainer.n_gpus_per_node"] = str(len(shape)), str(shape[0])
    else:
        total = sum(size for _, size in sets)
        shape = cluster.shape_of(total) if total >= cluster.machine else [total]
        words["trainer.nnodes"], words["trainer.n_gpus_per_node"] = str(len(shape)), str(shape[0])
        named = {next(name for role, name in _POOL_NAMES.items() if role in roles): roles for roles, _ in sets}
        sizes = dict(zip(named, (size for _, size in sets), strict=True))
        pools = ",".join(f"{name}:{_list(cluster.shape_of(size))}" for name, size in sizes.items())
        words["placement.pools"] = f"{{{pools}}}"
        placed = ",".join(f"{_KEYS_OF_PLACEMENT[role]}:{name}" for name, roles in named.items() for role in roles)
        words["placement.roles"] = f"{{{placed}}}"
    alone = next((size for roles, size in plan.sets if roles == (ROLLOUT,)), 0)
    if alone:
        shape = cluster.shape_of(alone)
        words["actor_rollout_ref.rollout.nnodes"] = str(len(shape))
        words["actor_rollout_ref.rollout.n_gpus_per_node"] = str(shape[0])
        words["actor_rollout_ref.rollout.name"] = _ENGINE
    return words


def _list(shape: list[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _generation(request: PlanRequest, plan: RunPlan) -> dict[str, str]:
    where, replicas = "actor_rollout_ref.rollout", plan.replicas
    return {
        f"{where}.tensor_model_parallel_size": str(replicas.tensor),
        f"{where}.gpu_memory_utilization": f"{replicas.share:g}",
        f"{where}.max_num_seqs": str(replicas.capacity),
    }


def _role(request: PlanRequest, plan: RunPlan, role: str, layout: TrainingLayout) -> dict[str, str]:
    where, group, model = PLACES[role]
    group = f"{where}.{group if plan.sharded else 'megatron'}"
    words = {}
    if role == ACTOR:
        words[f"{where}.strategy"] = "fsdp2" if plan.sharded else "megatron"
    if role == REF:
        words[f"{where}.log_prob_use_dynamic_bsz"] = "True"
        words[f"{where}.log_prob_max_token_len_per_gpu"] = str(layout.micro_tokens)
    else:
        words[f"{where}.use_dynamic_bsz"] = "True"
        words[f"{where}.ppo_max_token_len_per_gpu"] = str(layout.micro_tokens)
        words[f"{model}.enable_gradient_checkpointing"] = str(bool(layout.recompute))
        if layout.fused:
            words[f"{model}.use_fused_kernels"] = "True"
    if plan.sharded:
        sizes = {SHARDED_FIELDS["context"]: layout.context}
        if layout.shards != plan.devices_of(role):
            sizes[SHARDED_FIELDS["shards"]] = layout.shards
        default = plan.layouts[ACTOR].expert if role == REF else 1  # the reference follows the policy
        if layout.expert != default:
            sizes[SHARDED_FIELDS["expert"]] = layout.expert
    else:
        sizes = {
            "tensor_model_parallel_size": layout.tensor,
            "pipeline_model_parallel_size": layout.pipeline,
            "context_parallel_size": layout.context,
            "expert_model_parallel_size": layout.expert,
        }
        if layout.expert > 1 and layout.tensor > 1:
            words[f"{group}.expert_tensor_parallel_size"] = "1"
    explicit = role == REF or any(size != 1 for size in sizes.values())
    words |= {f"{group}.{name}": str(size) for name, size in sizes.items() if explicit}
    for name, level in (("param_offload", 2), ("optimizer_offload", 1)):
        if (name == "param_offload" or role != REF) and (layout.offload >= level or (role == REF and not plan.sharded)):
            words[f"{group}.{name}"] = str(layout.offload >= level)
    return words
