"""`verl.utils.metric.utils`: verl's `Metric`, which collects values; hybridrl's own merges weighted ones."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from hybridrl.observe import step_metrics as own

__all__ = ["AggregationType", "Metric", "reduce_metrics"]


class AggregationType(enum.Enum):
    """The ways to reduce the values of a metric to one number."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


_REDUCE: dict[AggregationType, Callable[[Any], Any]] = {
    AggregationType.MEAN: np.mean,
    AggregationType.SUM: np.sum,
    AggregationType.MIN: np.min,
    AggregationType.MAX: np.max,
}


class Metric:
    """Values of one metric and how they become one number.

    Args:
        aggregation: an `AggregationType` or its value.
        value: the first value.

    Raises:
        ValueError: there is no such aggregation, or the value is no single number.
    """

    def __init__(self, aggregation: str | AggregationType, value: Any = None) -> None:
        self.aggregation = AggregationType(aggregation)
        self.values: list[float] = []
        if value is not None:
            self.append(value)

    def append(self, value: Any) -> None:
        """Add a number, or the values of another metric."""
        if isinstance(value, Metric):
            self.extend(value)
            return
        if isinstance(value, (torch.Tensor, np.ndarray)) and value.shape not in ((), (1,)):
            raise ValueError(f"a metric takes single numbers, found shape {tuple(value.shape)}")
        self.values.append(value.item() if hasattr(value, "item") else value)

    def extend(self, values: Metric | Iterable[Any]) -> None:
        """Add several numbers, or the values of another metric with the same aggregation."""
        if isinstance(values, Metric):
            if values.aggregation is not self.aggregation:
                raise ValueError(f"a metric by {self.aggregation.value} cannot take one by {values.aggregation.value}")
            values = values.values
        for value in list(values):
            self.append(value)

    def aggregate(self) -> float:
        """Return the values as one number."""
        return float(_REDUCE[self.aggregation](self.values))

    @classmethod
    def aggregate_dp(cls, metric_lists: list[Metric]) -> float:
        """Return the metric of several data-parallel ranks: sums and means are averaged over the ranks.

        Raises:
            ValueError: there are no ranks, or they have different numbers of values.
        """
        if not metric_lists or len({len(metric.values) for metric in metric_lists}) != 1:
            raise ValueError(f"ranks have {[len(metric.values) for metric in metric_lists]} values; all need as many")
        kind = metric_lists[0].aggregation
        table = np.array([metric.values for metric in metric_lists])
        averaged = kind in (AggregationType.SUM, AggregationType.MEAN)
        return float(_REDUCE[kind](table.mean(axis=0) if averaged else table))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], aggregation: str | AggregationType) -> dict[str, Metric]:
        """Return one metric per entry."""
        return {name: cls(aggregation, value) for name, value in data.items()}

    def init_list(self) -> Metric:
        """Return an empty metric with the same aggregation."""
        return Metric(self.aggregation)


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Reduce a `Metric` by its own aggregation, and lists as `hybridrl.observe.step_metrics.reduce_metrics` does."""
    return {
        name: value.aggregate() if isinstance(value, Metric) else own.reduce_metrics({name: value})[name]
        for name, value in metrics.items()
    }
