"""Copies while micro-batches are computed, of state and of layers' inputs: the same results however late they are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HALF_BILLION
from gpu_helpers import batch_of, lognormal, seconds
from test_gpu_engine import MICRO, OFFLOAD, Sharded, built, exported, infer, step

from hybridrl.engine.fsdp.engine import FSDPEngine
from hybridrl.utils import device

pytestmark = pytest.mark.timeout(300)
SLEEP_CYCLES = 200_000_000
KINDS = pytest.mark.parametrize("kind", [FSDPEngine, Sharded], ids=["one rank", "FSDP2"])


class Slow(device.Transfer):
    """The bus is busy with something else for a tenth of a second before it copies."""

    cycles = SLEEP_CYCLES

    def __init__(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.cuda.stream(device.copy_stream(self.purpose)):
            torch.cuda._sleep(self.cycles)
        super().__init__(copies)


class SlowActivations(Slow):
    purpose, cycles = device.ActivationTransfer.purpose, SLEEP_CYCLES // 10


class Awaited(device.Transfer):
    """Nothing is computed until the copies are done."""

    def __init__(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__(copies)
        self.wait()


@KINDS
def test_results_with_a_slow_bus(world_of_one, tiny_model: Path, tmp_path: Path, kind) -> None:
    """PyTorch fills new memory with NaN where algorithms are deterministic, which shows what does not wait."""
    batch = batch_of(lognormal(12, 20, 40), 200)
    try:
        resident, late = (built(kind, tiny_model, full_determinism=True, **more) for more in ({}, OFFLOAD))
        late.model_state.offload.transfer = Slow
        for _ in range(3):
            assert step(late, batch) == step(resident, batch)
            assert torch.equal(infer(late, batch), infer(resident, batch))
        with late.loaded(optimizer=True):  # an update without a step, and one with
            pass
        late.save(tmp_path / "saved", ["model", "optimizer", "extra"])
        step(late, batch)
        late.load(tmp_path / "saved", ["model", "optimizer", "extra"])
        assert step(late, batch) == step(resident, batch)
        assert_same_weights(late, resident)
    finally:
        torch.use_deterministic_algorithms(False)


@KINDS
def test_copies_overlap_with_kernels(world_of_one, half_billion: Path, tmp_path: Path, figures, kind) -> None:
    batch = batch_of([(256, 768)] * 16, HALF_BILLION["vocab_size"])
    engine = built(kind, half_billion, **OFFLOAD)
    step(engine, batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(engine, batch)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    copies, kernels = read_trace(tmp_path / "trace.json", after=sum(1 for _ in engine.module.parameters()))
    begin, end = copies[0]["ts"], end_of(copies[-1])
    assert any(begin < kernel["ts"] < end for kernel in kernels)
    updates = [kernel["ts"] for kernel in kernels if "adam" in kernel["name"].lower()]
    assert updates and min(updates) >= end
    busy = merged([(kernel["ts"], end_of(kernel)) for kernel in kernels])
    taken = sum(copy["dur"] for copy in copies)
    shared = common([(copy["ts"], end_of(copy)) for copy in copies], busy)
    overlapped = seconds(lambda: step(engine, batch))
    engine.model_state.offload.transfer = Awaited
    figures(
        state_copy_ms=taken / 1e3,
        state_copy_gb_per_s=sum(copy["args"]["bytes"] for copy in copies) / taken / 1e3,
        state_copy_overlap=shared / taken,
        overlap_ratio=overlapped / seconds(lambda: step(engine, batch)),
    )


def assert_same_weights(engine: Any, peer: Any) -> None:
    expected = exported(peer)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported(engine).items())


class AwaitedActivations(Awaited):
    purpose = device.ActivationTransfer.purpose


def offload_of(engine: Any) -> Any:
    """What keeps the inputs of an engine's layers in main memory."""
    (call,) = {getattr(part, "_gradient_checkpointing_func", None) for part in engine.module.modules()} - {None}
    return call.func


@KINDS
def test_inputs_of_layers_with_a_slow_bus(world_of_one, half_billion: Path, kind) -> None:
    """Of a model of 24 layers, whose inputs leave and come back many at a time."""
    batch = batch_of([(20, 40)] * 8, HALF_BILLION["vocab_size"])
    try:
        resident, late = (
            built(kind, half_billion, activations={"enable_activation_offload": offload}, full_determinism=True)
            for offload in (False, True)
        )
        offload_of(late).transfer = SlowActivations
        for _ in range(2):
            assert step(late, batch) == step(resident, batch)
        assert_same_weights(late, resident)
    finally:
        torch.use_deterministic_algorithms(False)


@KINDS
def test_inputs_of_layers_leave_and_overlap(world_of_one, half_billion: Path, figures, kind) -> None:
    """After the forward pass those of the last two are on the device. Times: without, with, with awaited copies."""
    from engine_helpers import policy_loss

    batch = batch_of([(2048, 2048)] * 4, HALF_BILLION["vocab_size"])
    held: dict[str, int] = {}
    times: dict[str, float] = {}
    for name, offload in (("resident", False), ("offloaded", True), ("awaited", True)):
        settings = {"enable_activation_offload": offload, "use_fused_kernels": True}
        engine = built(kind, half_billion, activations=settings)
        if name == "awaited":
            offload_of(engine).transfer = AwaitedActivations

        def watching(outputs: Any, micro: Any, name: str = name) -> Any:
            held[name] = torch.cuda.memory_allocated()
            return policy_loss(outputs, micro)

        def update(engine: Any = engine, loss: Any = watching) -> None:
            with engine.loaded(optimizer=True):
                engine.train_batch(batch, MICRO, loss)

        update()
        times[name] = seconds(update)
        del engine, update, watching
        device.empty_cache()
    inputs = 4 * 4096 * HALF_BILLION["hidden_size"] * 2  # bytes of one layer's in bfloat16
    figures(
        inputs_off_the_device=(held["resident"] - held["offloaded"]) / inputs,
        activation_offload_ratio=times["offloaded"] / times["resident"],
        awaited_activations_ratio=times["awaited"] / times["resident"],
    )
    assert held["resident"] - held["offloaded"] > (HALF_BILLION["num_hidden_layers"] - 3) * inputs


def read_trace(path: Path, after: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The copies of the state to the GPU, and all kernels, in order of time; times are microseconds.

    Args:
        path: a trace of one update.
        after: so many copies of weights come before those of the state.
    """
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    events.sort(key=lambda event: event["ts"])
    copies = [event for event in events if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]]
    largest = max(copies, key=lambda event: event["args"]["bytes"])  # batches come by another stream
    of_offload = [event for event in copies if event["args"]["stream"] == largest["args"]["stream"]]
    assert len(of_offload) > after
    return of_offload[after:], [event for event in events if event.get("cat") == "kernel"]


def end_of(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans in order of their beginning, without overlap."""
    found: list[tuple[float, float]] = []
    for begin, end in spans:
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The time that spans of both lists cover; in each list they are in order, and none overlaps the next."""
    total, first = 0.0, 0
    for begin, end in spans:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        number = first
        while number < len(others) and others[number][0] < end:
            total += min(end, others[number][1]) - max(begin, others[number][0])
            number += 1
    return total
