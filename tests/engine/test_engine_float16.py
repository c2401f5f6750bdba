"""Training in float16: the loss is scaled, so that small gradients are no zeros and large ones no infinities."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from engine_helpers import TEMPERATURE, make_batch, make_engine, make_fields, policy_loss, value_loss, weights
from hypothesis import given
from raising import raises_with
from ranks import spawn

from hybridrl.engine import Engine, MicroBatching, NonFiniteError
from hybridrl.engine.loss_scale import LossScale
from hybridrl.errors import ModelError
from hybridrl.protocol import DataProto
from hybridrl.utils.metrics import merge_metrics

FIELDS = make_fields()
HALF = {"dtype": "float16"}
STEADY = {"lr_warmup_steps": 0, "lr_scheduler_type": "constant", "clip_grad": 1e9}
OPTIM = {**STEADY, "override_optimizer_config": {"eps": 1e-5}}


def times(factor: float, outputs: dict[str, torch.Tensor], micro: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    loss, metrics = policy_loss(outputs, micro)
    return loss * factor, metrics


def difference(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Sum of the absolute differences of all weights."""
    return float(sum((some[name] - others[name]).abs().sum() for name in some))


def step(engine: Engine, factor: float = 1.0, **settings: Any) -> dict[str, float]:
    batch = make_batch(FIELDS)
    metrics = engine.train_batch(batch, MicroBatching(size=4), partial(times, factor), TEMPERATURE, **settings)
    return {name: float(metric.value) for name, metric in merge_metrics([metrics]).items()}


def test_steps_are_those_of_float32_up_to_its_rounding(micro_model: Path) -> None:
    half, full = (make_engine(micro_model, optim=OPTIM, **engine) for engine in (HALF, {}))
    start = weights(full)
    for _ in range(3):
        ours, theirs = step(half), step(full)
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=5e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
        assert ours["loss_scale"] == 2**16 and "loss_scale" not in theirs
    after = weights(half)
    assert all(tensor.dtype == torch.float32 for tensor in after.values()), "of the master weights"
    assert difference(weights(full), after) < 0.1 * difference(weights(full), start)


@pytest.mark.parametrize("factor", [1e-6, 1e-4])
def test_small_gradients_are_no_zeros(micro_model: Path, factor: float) -> None:
    """Most of these would be below the smallest number of float16."""
    half, full = (make_engine(micro_model, optim=OPTIM, **engine) for engine in (HALF, {}))
    assert step(half, factor)["grad_norm"] == pytest.approx(step(full, factor)["grad_norm"], rel=2e-2)


def test_a_step_that_overflows_is_taken_with_a_smaller_scale(micro_model: Path) -> None:
    """Its gradients are those of float32, nothing is skipped, and the loss function sees each micro-batch anew."""
    half, full = (make_engine(micro_model, optim=OPTIM, **engine) for engine in (HALF, {}))
    ours, theirs = step(half, 1e4), step(full, 1e4)
    assert 1 <= ours["loss_scale"] < 2**16
    assert ours["skipped_steps"] == 0
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=5e-3), "metrics of one attempt"
    before = ours["loss_scale"]
    assert step(half, 1e4)["loss_scale"] <= before, "the next step begins with it"


def test_gradients_that_are_infinite_at_any_scale_are_named_and_leave_all_as_it_was(micro_model: Path) -> None:
    engine = make_engine(micro_model, optim=OPTIM, **HALF)
    before = weights(engine)
    with raises_with(NonFiniteError, "gradient"):
        step(engine, 1e30)
    assert step(engine, 1e30, on_nonfinite="skip")["skipped_steps"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
    with raises_with(NonFiniteError, "loss"):
        step(engine, float("nan"))
    assert step(engine)["loss_scale"] == 2**16, "a smaller scale did not help, and small gradients need this one"


def test_a_value_model_too(micro_model: Path) -> None:
    half, full = (make_engine(micro_model, "value_model", optim=OPTIM, **engine) for engine in (HALF, {}))
    batch = make_batch(FIELDS)
    for _ in range(2):
        ours, theirs = (
            merge_metrics([engine.train_batch(batch, MicroBatching(size=4), value_loss)]) for engine in (half, full)
        )
        assert ours["loss"].value == pytest.approx(theirs["loss"].value, rel=2e-2)


def test_a_run_goes_on_with_its_scale(micro_model: Path, tmp_path: Path) -> None:
    contents = ["model", "optimizer", "extra"]
    engine, again = (make_engine(micro_model, optim=OPTIM, **HALF) for _ in range(2))
    scale = step(engine, 1e4)["loss_scale"]
    engine.save(tmp_path, contents)
    again.load(tmp_path, contents)
    assert step(engine) == step(again) and step(again)["loss_scale"] == scale
    step(engine)
    assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in weights(engine).items())
    full = make_engine(micro_model, optim=OPTIM)
    full.load(tmp_path, contents)  # in another dtype, too
    assert "loss_scale" not in step(full)


def test_master_weights_in_float16_are_refused(micro_model: Path) -> None:
    with raises_with(ModelError, "fsdp_config.model_dtype", "float32"):
        make_engine(micro_model, **HALF, model_dtype="float16")


def two_ranks(rank: int, folder: Path, model: Path) -> None:
    engine = make_engine(model, optim=OPTIM, **HALF)
    batch = make_batch(FIELDS, slice(0, 9) if rank == 0 else slice(9, None))
    for factor in (1.0, 1e4):
        metrics = engine.train_batch(batch, MicroBatching(size=4), partial(times, factor), TEMPERATURE)
    numbers = {name: float(metric.value) for name, metric in merge_metrics([metrics]).items()}
    torch.save((numbers, weights(engine)), folder / f"{rank}.pt")


def test_two_ranks_agree_on_the_scale_and_train_as_one(micro_model: Path, tmp_path: Path) -> None:
    spawn(two_ranks, 2, tmp_path, micro_model)
    single = make_engine(micro_model, optim=OPTIM, **HALF)
    start = weights(single)
    step(single)
    numbers = step(single, 1e4)
    for rank in range(2):
        their_numbers, theirs = torch.load(tmp_path / f"{rank}.pt")
        assert their_numbers["loss_scale"] == numbers["loss_scale"] < 2**16, (
            "shares of the loss are scaled as the whole"
        )
        assert their_numbers["grad_norm"] == pytest.approx(numbers["grad_norm"], rel=5e-2)
        assert difference(theirs, weights(single)) < 0.1 * difference(weights(single), start)


@given(st.lists(st.booleans(), max_size=60))
def test_the_scale_is_a_power_of_two_within_its_bounds(overflows: list[bool]) -> None:
    scale = LossScale()
    for overflow in overflows:
        if overflow:
            before = scale.value
            assert scale.halve() is (before > 1) and scale.value == max(before / 2, 1)
        else:
            for _ in range(1000):
                scale.count()
        assert 1 <= scale.value <= 2**24 and scale.value.hex().startswith("0x1.0")
    again = LossScale()
    again.load(scale.state())
    assert again == scale
