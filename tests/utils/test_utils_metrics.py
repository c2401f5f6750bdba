"""Merging metrics gives what one computation over all the data gives."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.utils.metrics import Metric, as_metrics, merge_metrics, reduce_to_floats, to_floats

NUMBERS = st.floats(-1e3, 1e3)


@given(st.lists(st.lists(NUMBERS, min_size=0, max_size=5), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_parts_merge_to_the_whole(parts: list[list[float]], random: Any) -> None:
    everything = [x for part in parts for x in part]
    metrics = []
    for part in parts:
        count = len(part)
        metrics.append(
            {
                "mean": Metric(sum(part) / count if count else math.nan, count),
                "sum": Metric(torch.tensor(sum(part), dtype=torch.float64), kind="sum"),
                **({"max": Metric(max(part), kind="max"), "min": Metric(min(part), kind="min")} if part else {}),
            }
        )
    random.shuffle(metrics)
    half = len(metrics) // 2
    for merged in (
        merge_metrics(metrics),
        merge_metrics([merge_metrics(metrics[:half]), merge_metrics(metrics[half:])]),
    ):
        values = reduce_to_floats(merged)
        assert values["sum"] == pytest.approx(sum(everything), abs=1e-6)
        assert values["mean"] == pytest.approx(sum(everything) / len(everything) if everything else 0.0, abs=1e-6)
        if everything:
            assert (values["max"], values["min"]) == (max(everything), min(everything))


def test_plain_values_take_the_weight() -> None:
    first = as_metrics({"a": 1.0, "b": Metric(5.0, kind="sum")}, weight=1)
    second = as_metrics({"a": torch.tensor(4.0, requires_grad=True), "b": Metric(6, kind="sum")}, weight=3)
    assert reduce_to_floats(merge_metrics([first, second])) == {"a": 3.25, "b": 11.0}


def test_values_are_plain_after_reading() -> None:
    read = to_floats({"a": Metric(torch.tensor(2.0), torch.tensor(3)), "b": Metric(1)})
    assert read == {"a": Metric(2.0, 3.0), "b": Metric(1.0, 1.0)} and type(read["a"].value) is float
    assert pickle.loads(pickle.dumps(read)) == read


def test_kinds_are_checked() -> None:
    with raises_with(ValueError, "kind='median'"):
        Metric(1.0, kind="median")  # type: ignore[arg-type]
    with raises_with(ValueError, "'a'"):
        merge_metrics([{"a": Metric(1.0)}, {"a": Metric(1.0, kind="max")}])
