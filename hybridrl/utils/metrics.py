"""Numbers that merge exactly over micro-batches, mini-batches and ranks.

A mean of means is wrong if the parts differ in size. A `Metric` therefore carries its weight. Merging metrics gives the
same result as one computation over all the data, in any order of merging.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

Kind = Literal["mean", "sum", "max", "min"]
KINDS = ("mean", "sum", "max", "min")
Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class Metric:
    """One number and how it merges with others of the same name.

    Attributes:
        value: a float, or a tensor with one element while the computation runs (reading it would wait for the device).
        weight: the weight in a mean: tokens, sequences, steps. The other kinds do not use it.
        kind: `mean` (weighted), `sum`, `max` or `min`.
    """

    value: float | torch.Tensor
    weight: float | torch.Tensor = 1.0
    kind: Kind = "mean"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a Metric is one of {', '.join(KINDS)}; kind={self.kind!r} is none of them")


def to_floats(metrics: Mapping[Key, Metric]) -> dict[Key, Metric]:
    """Return the same metrics with plain floats. All tensors of a device are read in one transfer."""
    tensors = [
        part.detach().reshape(()).to(torch.float64)
        for metric in metrics.values()
        for part in (metric.value, metric.weight)
        if isinstance(part, torch.Tensor)
    ]
    if not tensors:
        return dict(metrics)
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    numbers = iter(torch.stack(tensors).tolist())

    def read(part: float | torch.Tensor) -> float:
        return next(numbers) if isinstance(part, torch.Tensor) else float(part)

    return {name: Metric(read(metric.value), read(metric.weight), metric.kind) for name, metric in metrics.items()}


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge dictionaries of metrics by name. A name may be missing in some of them. The values become floats.

    A mean becomes `sum(w_i v_i) / sum(w_i)`. Parts of weight 0 do not count; if all weights are 0, the value is 0.

    Raises:
        ValueError: a name occurs with two kinds.
    """
    # All tensors of all parts are read together, which waits for the device once, regardless of the micro-batches.
    read = to_floats({(number, name): metric for number, part in enumerate(parts) for name, metric in part.items()})
    gathered: dict[str, list[Metric]] = {}
    for (_, name), metric in read.items():
        gathered.setdefault(name, []).append(metric)
    return {name: _merge(name, metrics) for name, metrics in gathered.items()}


def _merge(name: str, metrics: list[Metric]) -> Metric:
    kinds = {metric.kind for metric in metrics}
    if len(kinds) > 1:
        raise ValueError(f"metric {name!r} comes with several kinds: {', '.join(sorted(kinds))}; give it one")
    kind = metrics[0].kind
    values = [float(metric.value) for metric in metrics]
    weights = [float(metric.weight) for metric in metrics]
    if kind == "sum":
        return Metric(sum(values), sum(weights), kind)
    if kind in ("max", "min"):
        return Metric(max(values) if kind == "max" else min(values), sum(weights), kind)
    if len(values) == 1 and weights[0]:
        return metrics[0]
    total = sum(weights)
    # A part with weight 0 may hold any value, including NaN (the mean over no tokens).
    value = sum(v * w for v, w in zip(values, weights, strict=True) if w) / total if total else 0.0
    return Metric(value, total, kind)


def as_metrics(values: Mapping[str, Any], weight: float | torch.Tensor) -> dict[str, Metric]:
    """Wrap plain numbers and tensors as means with the given weight. A `Metric` is unchanged."""
    return {
        name: value if isinstance(value, Metric) else Metric(_detached(value), weight) for name, value in values.items()
    }


def _detached(value: Any) -> float | torch.Tensor:
    return value.detach() if isinstance(value, torch.Tensor) else float(value)


def reduce_to_floats(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Map each name to a plain number, for a tracker."""
    return {name: float(metric.value) for name, metric in to_floats(metrics).items()}
