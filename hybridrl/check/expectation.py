"""The memory and the seconds that a run is expected to take, by the planner's formulas."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridrl.check.findings import Findings
from hybridrl.config import PairsDataConfig, PPOTrainerConfig, SupervisedConfig
from hybridrl.config.roles import MicroBatches
from hybridrl.errors import PlacementError, UserError
from hybridrl.plan.configured import configured_plan, engine_fields, micro_tokens
from hybridrl.plan.devices import Cluster
from hybridrl.plan.factors import FITTED, STEP_ERROR
from hybridrl.plan.layout_options import device_budget
from hybridrl.plan.model_bytes import RESERVED, model_memory
from hybridrl.plan.run_plan import described_run, is_sharded
from hybridrl.plan.seconds import StepSize, TrainingLayout, training
from hybridrl.plan.shapes import read_shape
from hybridrl.registry import OBJECTIVES

_GIB = 1024**3
_BATCHING = MicroBatches("data", "micro_batch_size_per_gpu", "max_token_len_per_gpu")
_REMEDIES = "offload, smaller micro-batches or more devices need less (hybridrl plan chooses them for grpo and ppo)"


def describe_expectation(findings: Findings, config: Any, cluster: Cluster | None, mean: float | None) -> None:
    """Add the memory of each phase, and the seconds of a step; a phase that is too large is a problem.

    Args:
        cluster: the devices; None: they are not known.
        mean: mean tokens of a prompt, or of a row of fine-tuning; None: not known.
    """
    if cluster is None:
        findings.say("prediction", "none: devices= is not set, and this machine has no GPU of the planner's table")
        return
    try:
        if isinstance(config, PPOTrainerConfig):
            seconds, memory, used = _of_ppo(findings, config, cluster, mean)
        else:
            seconds, memory, used = _of_supervised(config, cluster, mean)
    except PlacementError as error:
        findings.refuse(error)
        return
    except UserError as error:
        findings.say("prediction", f"none: {error}")
        return
    findings.facts["prediction"] = {
        "devices": {"name": cluster.device.name, "count": cluster.count, "used": used},
        "seconds": seconds,
        "bytes": memory,
        "relative_error": STEP_ERROR,
    }
    _describe_memory(findings, cluster, memory)
    _describe_seconds(findings, config, cluster, seconds, used)


def _describe_memory(findings: Findings, cluster: Cluster, memory: Mapping[str, float]) -> None:
    budget = device_budget(cluster)
    for phase, size in memory.items():
        findings.say("prediction", f"{phase}: {size / _GIB:.1f} GiB per device of {budget / _GIB:.1f}")
    for phase in (phase for phase, size in memory.items() if size > budget):
        findings.problems.append(
            f"devices={cluster.count}x{cluster.device.name}: {phase} is expected to take "
            f"{memory[phase] / _GIB:.1f} GiB per device, and {1 - RESERVED:.0%} of one are {budget / _GIB:.1f} GiB; "
            f"{_REMEDIES}"
        )


def _describe_seconds(
    findings: Findings, config: Any, cluster: Cluster, seconds: Mapping[str, float], used: int
) -> None:
    if seconds["step"] == float("inf"):
        key = "actor_rollout_ref.rollout.gpu_memory_utilization"
        findings.problems.append(
            f"{key}={config.actor_rollout_ref.rollout.gpu_memory_utilization}: weights and the keys and values of the "
            "longest sequence do not fit in an engine; raise it, or tensor_model_parallel_size"
        )
        return
    phases = ", ".join(f"{name} {value:.0f}" for name, value in seconds.items() if name != "step")
    findings.say(
        "prediction",
        f"{seconds['step']:.0f} s per step ({phases}), by factors whose median error is {STEP_ERROR:.0%} for a new "
        "model and more for this library, whose runs on several GPUs were not measured (docs/plan.md)",
    )
    if used < cluster.count:
        findings.warnings.append(
            f"trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: the "
            f"run uses {used} of {cluster.count} devices; set trainer.nnodes={cluster.machines} "
            f"trainer.n_gpus_per_node={min(cluster.machine, cluster.count)}"
        )


def _of_ppo(
    findings: Findings, config: PPOTrainerConfig, cluster: Cluster, mean: float | None
) -> tuple[dict[str, float], dict[str, float], int]:
    request = described_run(config, cluster)
    assumed = request.assumed
    if config.placement.prompt is None and mean is not None:
        prompt = min(max(mean, 1.0), config.data.max_prompt_length)
        request = replace(request, step=replace(request.step, prompt=prompt))
        assumed = tuple(text for text in assumed if "prompt=MEAN" not in text)
    findings.say("prediction", *(f"assumed: {text}" for text in assumed))
    plan = configured_plan(request)
    return dict(plan.seconds), dict(plan.memory), sum(size for _, size in plan.sets)


def _of_supervised(
    config: SupervisedConfig, cluster: Cluster, mean: float | None
) -> tuple[dict[str, float], dict[str, float], int]:
    n = sum(config.placement.pools[config.placement.roles["model"]])
    if n > cluster.count:
        raise PlacementError(
            f"trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node={config.trainer.n_gpus_per_node} are "
            f"{n} devices, and devices={cluster.count}x{cluster.device.name}; lower them, or "
            "set devices= to what there is"
        )
    if config.model.adapted:
        raise UserError("nothing is predicted for adapters (model.lora_rank)")
    sharded = is_sharded("engine.strategy", config.engine.strategy)
    rows = 2 if isinstance(config.data, PairsDataConfig) else 1
    length = min(mean or config.data.max_length / 2, config.data.max_length)
    step = StepSize(
        rows * config.data.train_batch_size, 1, 0.0, length, config.data.max_length, 1, config.data.max_length
    )
    layout = TrainingLayout(
        sharded,
        micro_tokens=micro_tokens(config.data, _BATCHING, rows * config.data.max_length),
        recompute=int(config.model.enable_gradient_checkpointing),
        fused=int(config.model.use_fused_kernels),
        **engine_fields(config.engine, n, sharded, True),
    )
    model = read_shape(config.model.path)
    own = model_memory(model, n, layout, step, True)
    memory = {"update_model": float(own.update)}
    seconds = {"update_model": float(training(model, cluster.device, FITTED, n, layout, step, True))}
    if config.reference == "model":
        frozen = model_memory(model, n, layout, step, False)
        memory = {"update_model": float(own.update + frozen.resident)}
        memory["reference"] = float(own.resident + frozen.pass_peak)
        seconds["reference"] = float(training(model, cluster.device, FITTED, n, layout, step, False))
        if OBJECTIVES.metadata(config.objective.loss_type).kl_baseline:
            seconds["kl_baseline"] = 2 * seconds["reference"]  # as many rows, by the model and by the reference
    seconds["step"] = sum(seconds.values())
    return seconds, memory, n
