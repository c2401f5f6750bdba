"""Algorithm 2: the layouts in which a model can be trained, and the engines' replicas, with seconds and bytes.

A setting that the user gave is the only candidate for its field. Among candidates that take about as long, those that
differ less from the defaults are preferred: each change counts as one percent of the time, in the search alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hybridrl.plan.devices import Cluster
from hybridrl.plan.model_bytes import RESERVED, model_memory
from hybridrl.plan.search import RunOption, front_of
from hybridrl.plan.seconds import CostFactors, StepSize, TrainingLayout, generation, refit, training
from hybridrl.plan.shapes import ModelShape

PER_CHANGE = 0.01
_MICRO_TOKENS = 16384  # the default
_CAPACITY = 256  # the default of rollout.max_num_seqs
_EXPERT_RANKS = 64  # most ranks among which FSDP2's experts are divided
_SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85)  # of a device's memory, for an engine
_NAMES = tuple(field.name for field in fields(TrainingLayout) if field.name != "sharded")


@dataclass(frozen=True)
class TrainedRole:
    """A role that computes with a training engine.

    Attributes:
        model: its shape.
        passes: passes without gradients over the batch of a step.
        step: its batch.
        trains: whether it is updated.
        fixed: values of fields of `TrainingLayout` that the user gave.
        divides_experts: whether FSDP2 can divide its experts among ranks.
    """

    model: ModelShape
    passes: int
    step: StepSize
    trains: bool
    fixed: Mapping[str, Sequence[int]]
    divides_experts: bool = False


@dataclass(frozen=True)
class Replicas:
    """The replicas of the engine: devices per replica, share of a device's memory, and sequences at once."""

    tensor: int
    share: float
    capacity: int


@dataclass(frozen=True)
class GeneratingRole:
    """The role that generates.

    Attributes:
        model: its shape.
        step: its batch.
        tensor, share, capacity: values that the user gave; empty: any.
    """

    model: ModelShape
    step: StepSize
    tensor: Sequence[int] = ()
    share: Sequence[float] = ()
    capacity: Sequence[int] = ()


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**power for power in range(max(most, 1).bit_length()) if 2**power <= most]


def _divisors(experts: int, most: int) -> list[int]:
    """Powers of two up to `most` that divide the experts."""
    return [size for size in powers_of_two(most) if experts % size == 0]


def _cut_evenly(model: ModelShape, shards: np.ndarray, expert: np.ndarray) -> Any:
    """Whether FSDP2 can cut a rank's experts evenly over shards / EP ranks [K]: whole ones, or their hidden sizes."""
    ranks = np.maximum(shards // expert, 1)
    sizes = np.gcd(model.hidden, model.expert_ffn)
    return (shards % expert == 0) & ((model.experts // expert % ranks == 0) | (sizes % ranks == 0))


def _candidates(role: TrainedRole, cluster: Cluster, n: int, sharded: bool) -> dict[str, Sequence[int]]:
    """Values of each field that make sense for any value of the others."""
    model, inside = role.model, powers_of_two(min(n, cluster.machine))
    single, most = [1], role.step.sequence
    values: dict[str, Sequence[int]] = dict.fromkeys(_NAMES, single)
    values["micro_tokens"] = sorted({max(_MICRO_TOKENS, most), max(2 * _MICRO_TOKENS, most), most})
    values["recompute"] = [1, 0] if role.trains else single
    values["fused"] = [0, 1] if role.trains else [0]
    values["offload"] = [0, 1, 2] if role.trains else [0, 2]
    values["context"] = [size for size in inside if model.heads % size == 0]
    if sharded:
        values["micro_tokens"] = sorted({*values["micro_tokens"], *(-(-most // size) for size in values["context"])})
        values["shards"] = [n, cluster.machine] if n > cluster.machine else [n]
        if role.divides_experts:
            values["expert"] = _divisors(model.experts, min(n, _EXPERT_RANKS))
    else:
        values["tensor"] = [size for size in inside if model.heads % size == 0 and model.kv_heads % size == 0]
        values["pipeline"] = [size for size in powers_of_two(min(n, 16)) if model.layers % size == 0]
        values["context"] = [size for size in values["context"] if size <= 4]
        values["expert"] = _divisors(model.experts, n) if model.experts else single
        values["offload"] = [0, 2]
        values["micro_tokens"] = [max(_MICRO_TOKENS, most)]
    return {name: role.fixed.get(name, candidates) for name, candidates in values.items()}


def layouts(role: TrainedRole, cluster: Cluster, n: int, sharded: bool) -> TrainingLayout | None:
    """Return all layouts of a role on n devices as arrays [K]; None if there are none."""
    values = _candidates(role, cluster, n, sharded)
    grid = np.meshgrid(*(np.array(values[name]) for name in _NAMES), indexing="ij")
    table = {name: axis.ravel() for name, axis in zip(_NAMES, grid, strict=True)}
    if "shards" in role.fixed:  # -1: all
        table["shards"] = np.where(table["shards"] < 1, n, np.minimum(table["shards"], n))
    split = table["tensor"] * table["pipeline"] * table["context"]
    valid = (n % split == 0) & (n % np.maximum(table["shards"], 1) == 0)
    valid &= (n % (table["expert"] * table["pipeline"]) == 0) & (table["tensor"] * table["context"] <= cluster.machine)
    if sharded:
        valid &= (table["expert"] == 1) | _cut_evenly(role.model, table["shards"], table["expert"])
    valid &= table["micro_tokens"] * table["context"] >= role.step.sequence
    valid &= (table["context"] == 1) | (table["micro_tokens"] <= 2 * _MICRO_TOKENS)
    if not valid.any():
        return None
    return TrainingLayout(sharded, **{name: column[valid] for name, column in table.items()})


def changes(layout: TrainingLayout, n: int) -> Any:
    """Return how many fields differ from the defaults [K]."""
    split = sum((np.asarray(getattr(layout, name)) > 1).astype(int) for name in ("tensor", "context", "pipeline"))
    others = [
        np.asarray(layout.expert) > 1,
        np.asarray(layout.micro_tokens) != _MICRO_TOKENS,
        np.asarray(layout.recompute) == 0,
        np.asarray(layout.fused) > 0,
        np.asarray(layout.offload) > 0,
    ]
    if layout.sharded:
        others.append(np.asarray(layout.shards) != n)
    return split + sum(other.astype(int) for other in others)


def trained_options(
    role: TrainedRole, cluster: Cluster, factors: CostFactors, n: int, sharded: bool, slack: float
) -> list[RunOption]:
    """Return the ways to run a role on n devices; `how` is the `TrainingLayout`.

    Seconds are of the stages generation, preparation and update. Only candidates that fit on an empty device and that
    no other one beats in seconds and bytes are returned.
    """
    table = layouts(role, cluster, n, sharded)
    if table is None:
        return []
    memory = model_memory(role.model, n, table, role.step, role.trains)
    highest = np.maximum(memory.update, memory.pass_peak)
    penalty = 1 + PER_CHANGE * changes(table, n)

    def seconds(backward: bool) -> np.ndarray:
        return np.asarray(training(role.model, cluster.device, factors, n, table, role.step, backward)) * penalty

    passes = role.passes * seconds(False)
    update = seconds(True) if role.trains else 0 * passes
    columns = np.stack([passes, update, memory.resident + 0 * passes, highest - memory.resident + 0 * passes], axis=1)
    fitting = np.flatnonzero(highest <= device_budget(cluster))
    best = fitting[front_of(columns[fitting], slack)]
    return [
        RunOption((0.0, float(before), float(after)), float(resident), float(beyond), table.at(int(index)))
        for index, (before, after, resident, beyond) in zip(best, columns[best], strict=True)
    ]


def device_budget(cluster: Cluster) -> float:
    """Bytes of a device that a plan may use."""
    return (1 - RESERVED) * cluster.device.memory_gb * 1e9


def replica_options(
    role: GeneratingRole, cluster: Cluster, factors: CostFactors, n: int, slack: float
) -> list[RunOption]:
    """Return the ways to generate on n devices; `how` is `Replicas`.

    Its seconds include those in which new weights arrive.
    """
    sizes = [t for t in role.tensor or powers_of_two(min(n, 64)) if n % t == 0 and role.model.heads % t == 0]
    options = []
    for t in sizes:
        for share in role.share or _SHARES:
            for capacity in role.capacity or (_CAPACITY, 4 * _CAPACITY):
                duration = generation(role.model, cluster.device, factors, n, t, role.step, share, capacity)
                if np.isfinite(duration):
                    penalty = 1 + PER_CHANGE * ((t > 1) + (capacity != _CAPACITY))
                    stages = ((duration + refit(role.model, factors)) * penalty, 0.0, 0.0)
                    peak = share * cluster.device.memory_gb * 1e9
                    options.append(RunOption(stages, 0.0, peak, Replicas(t, share, capacity)))
    table = np.array([(option.stages[0], option.peak) for option in options]).reshape(-1, 2)
    return [options[index] for index in front_of(table, slack)]
