"""Master weights and optimizer state arrive while micro-batches are computed; results are those without offloading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import TEMPERATURE, make_batch, make_engine, make_fields, policy_loss
from late_transfer import LateTransfer
from test_engine_offload import KINDS, OFFLOAD, world_of_one  # noqa: F401 (a fixture)

from hybridrl.engine import MicroBatching, NonFiniteError
from hybridrl.engine.fsdp.engine import FSDPEngine
from hybridrl.engine.fsdp.offload import plain_parts
from hybridrl.utils import device

FIELDS = make_fields()
#: so that every group of tensors is there and differs in dtype: bfloat16 weights, float32 masters and moments
MIXED = {"dtype": "bfloat16"}


def late_engine(path: Path, **settings: Any) -> Any:
    engine: Any = make_engine(path, **settings, **OFFLOAD)
    engine.model_state.offload.transfer = LateTransfer
    return engine


def train(engine: Any, loss: Any = policy_loss, **options: Any) -> dict[str, float]:
    micro = MicroBatching(size=4)
    metrics = engine.train_batch(make_batch(FIELDS), micro, loss, TEMPERATURE, **options)
    return {name: float(metric.value) for name, metric in metrics.items()}


def state_parts(engine: Any) -> list[torch.Tensor]:
    """Master weights and the optimizer's state, as they are now."""
    masters = [] if engine.model_state.masters is None else engine.model_state.masters.tensors()
    states = [
        engine.model_state.optimizer.state[one]
        for one in engine.model_state.trainable.values()
        if one in engine.model_state.optimizer.state
    ]
    tensors = [*masters, *(state[name] for state in states for name in sorted(state) if state[name].ndim)]
    return [part for tensor in tensors for part in plain_parts(tensor)]


def test_the_first_pass_begins_before_the_state_is_there(micro_model: Path) -> None:
    resident, late = make_engine(micro_model, **MIXED), late_engine(micro_model, **MIXED)
    for engine in (resident, late):  # makes the optimizer's state
        with engine.loaded(optimizer=True):
            train(engine)
    kept = [part.clone() for part in state_parts(late)]
    seen: list[int] = []

    def watching(outputs: dict[str, torch.Tensor], micro: Any) -> Any:
        parts = state_parts(late)
        assert all(outputs["log_probs"].isfinite().flatten())
        seen.append(sum(bool(part.isnan().all()) for part in parts))
        return policy_loss(outputs, micro)

    with late.loaded(optimizer=True), resident.loaded(optimizer=True):
        assert train(late, watching) == train(resident)
        assert not any(part.isnan().any() for part in state_parts(late))
        first, seen[:] = list(seen), []
        assert train(late, watching) == train(resident)
    assert first == [len(kept)] * 3 and len(kept) == 3 * len(late.model_state.trainable)  # in each of the micro-batches
    assert seen == [0, 0, 0]  # the second update of the same use has it from the beginning
    assert not any(torch.equal(now, before) for now, before in zip(state_parts(late), kept, strict=True))


def broken(outputs: dict[str, torch.Tensor], micro: Any) -> Any:
    loss, metrics = policy_loss(outputs, micro)
    return loss * float("nan"), metrics


def failing(outputs: dict[str, torch.Tensor], micro: Any) -> Any:
    raise ZeroDivisionError("in the loss")


def exported(engine: Any) -> list[torch.Tensor]:
    return [tensor.clone() for _, tensor in engine.export_weights()]


def sent(engine: Any) -> list[torch.Tensor]:
    return [shard.tensor.clone() for shard in engine.export_shards()]


def copied(engine: Any) -> list[torch.Tensor]:
    slices = engine.copy_state(["model", "optimizer"]).slices
    return [tensor_slice.values for part in ("model", "optimizer") for tensor_slice in slices[part]]


def trained_twice(engine: Any) -> list[dict[str, float]]:
    return [train(engine), train(engine)]


def skipped(engine: Any) -> float:
    return train(engine, broken, on_nonfinite="skip")["skipped_steps"]


def refused(engine: Any) -> None:
    with pytest.raises(NonFiniteError):
        train(engine, broken)


def interrupted(engine: Any) -> None:
    with pytest.raises(ZeroDivisionError, match="in the loss"):
        train(engine, failing)


def unused(engine: Any) -> None:
    pass


def out_of_memory(engine: Any) -> list[dict[str, float]]:
    """A step that is discarded in its second micro-batch and repeated, and the next one."""
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    handle = engine.module.model.layers[-1].register_forward_pre_hook(fail)
    try:
        found = trained_twice(engine)
    finally:
        handle.remove()
    assert len(calls) > 8  # not only the micro-batches of two updates
    return found


USES = [trained_twice, exported, sent, copied, skipped, refused, interrupted, unused]


def same(got: Any, expected: Any) -> None:
    if isinstance(expected, list) and all(isinstance(one, torch.Tensor) for one in expected):
        assert len(got) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    else:
        assert got == expected


def check_uses(resident: Any, late: Any, uses: list[Callable[[Any], Any]]) -> None:
    """Each use does what it does without offloading, and leaves the state that it leaves then."""
    for use in (trained_twice, *uses):
        for engine, results in ((resident, expected := []), (late, got := [])):
            with engine.loaded(optimizer=True):
                results.append(use(engine))
        same(got[0], expected[0])
        same(state_parts(late), state_parts(resident))
        with resident.loaded(), late.loaded():
            same(exported(late), exported(resident))


@pytest.mark.parametrize("kind", KINDS)
def test_however_a_use_ends(
    world_of_one: None,  # noqa: F811
    micro_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
) -> None:
    monkeypatch.setattr(FSDPEngine, "_is_sharded", kind)
    check_uses(make_engine(micro_model, **MIXED), late_engine(micro_model, **MIXED), USES)


def test_a_step_that_runs_out_of_memory(micro_model: Path) -> None:
    check_uses(make_engine(micro_model, **MIXED), late_engine(micro_model, **MIXED), [out_of_memory])


def test_an_adapter_that_is_sent_before_the_first_step(micro_model: Path) -> None:
    def adapter(engine: Any) -> list[torch.Tensor]:
        return [tensor.clone() for _, tensor in engine.export_adapter()]

    settings: dict[str, Any] = {"model": {"lora_rank": 2}, **MIXED}
    resident, late = make_engine(micro_model, **settings), late_engine(micro_model, **settings)
    check_uses(resident, late, [adapter, exported])


def test_memory_that_lacks_for_the_state(micro_model: Path) -> None:
    """Master weights are on their way when there is no memory for the moments; a later use has both."""
    resident, late = make_engine(micro_model, **MIXED), late_engine(micro_model, **MIXED)
    check_uses(resident, late, [])
    begun: list[int] = []

    class Failing(LateTransfer):
        def __init__(self, copies: Any) -> None:
            begun.append(1)
            if len(begun) == 3:  # after weights and master weights
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            super().__init__(copies)

    late.model_state.offload.transfer = Failing
    with pytest.raises(torch.OutOfMemoryError), late.loaded(optimizer=True):
        pass
    assert len(begun) == 3
    check_uses(resident, late, [])


def test_copies_on_a_cpu_are_done_at_once() -> None:
    """There is nothing that would copy while the CPU computes."""
    target, source = torch.zeros(3), torch.arange(3.0)
    transfer = device.Transfer([(target, source)])
    if not device.is_gpu():
        assert torch.equal(target, source) and device.copy_stream() is None
    transfer.wait()
    source.fill_(7)
    transfer.wait()
    assert target.tolist() == [0, 1, 2]
