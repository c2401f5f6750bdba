"""`use_torch_compile` against the same steps without it: one rank, and two ranks under FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_helpers import TEMPERATURE, make_batch, make_engine, make_fields, policy_loss, weights
from ranks import spawn
from torch._dynamo.utils import counters

from hybridrl.engine import Engine, MicroBatching
from hybridrl.protocol import DataProto
from hybridrl.utils import distributed
from hybridrl.utils.metrics import merge_metrics

FIELDS = [make_fields(seed=seed) for seed in (0, 1)]  # rows of other lengths in the second step
SETTINGS = {"override_optimizer_config": {"eps": 1e-5}}
SPLIT = 7  # rows of rank 0
MICRO = MicroBatching(size=4)


def steps(engine: Engine, rows: slice = slice(None)) -> list[dict[str, float]]:
    """The metrics of two steps, of all ranks."""
    found = []
    for fields in FIELDS:
        own = engine.train_batch(make_batch(fields, rows), MICRO, policy_loss, TEMPERATURE, entropy=True)
        merged = merge_metrics(distributed.all_gather_object(own) if dist.is_initialized() else [own])
        found.append({name: float(metric.value) for name, metric in merged.items()})
    return found


def log_probs(engine: Engine, batch: DataProto) -> torch.Tensor:
    return engine.infer(batch, MICRO, TEMPERATURE)["log_probs"]


def compile_lightly(patch: pytest.MonkeyPatch, backend: str) -> None:
    """Trace layers, with `aot_eager` also their backward passes. What needs a C++ compiler and a minute is left out."""
    usual = torch.nn.Module.compile
    patch.setattr(torch.nn.Module, "compile", lambda part, **given: usual(part, **given, backend=backend))


def traced() -> int:
    """Graphs that were made; a break within a layer fails."""
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


@pytest.fixture(scope="module")
def expected(micro_model: Path) -> dict[str, Any]:
    """What one rank computes without it."""
    engine = make_engine(micro_model, optim=SETTINGS)
    metrics = steps(engine)
    return {"metrics": metrics, "after": weights(engine), "log_probs": log_probs(engine, make_batch(FIELDS[0]))}


def check(engine: Engine, expected: dict[str, Any], rows: slice = slice(None)) -> None:
    for got, wanted in zip(steps(engine, rows), expected["metrics"], strict=True):
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    for name, tensor in weights(engine).items():
        torch.testing.assert_close(tensor, expected["after"][name], atol=4e-5, rtol=1e-4)


def test_compiled_layers_compute_the_same(
    micro_model: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    counters.clear()
    compile_lightly(monkeypatch, "aot_eager")
    engine = make_engine(micro_model, optim=SETTINGS, use_torch_compile=True)
    check(engine, expected)
    assert 0 < traced() <= 2  # with and without a gradient of the layer's input, for all layers and lengths
    found = log_probs(engine, make_batch(FIELDS[0]))
    torch.testing.assert_close(found, expected["log_probs"], atol=1e-5, rtol=1e-5)
    assert traced() <= 3
    torch._dynamo.reset()


def body(rank: int, model: Path, work: Path) -> None:
    expected = torch.load(work / "expected.pt", weights_only=True)
    own = slice(0, SPLIT) if rank == 0 else slice(SPLIT, None)
    with pytest.MonkeyPatch.context() as patch:
        compile_lightly(patch, "eager")
        settings: dict[str, Any] = {"reshard_after_forward": False, "forward_prefetch": True}
        check(make_engine(model, optim=SETTINGS, use_torch_compile=True, **settings), expected, own)
    assert traced() > 0


@pytest.mark.slow(12)
def test_two_ranks_compute_the_same(micro_model: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    torch.save(expected, tmp_path / "expected.pt")
    spawn(body, 2, micro_model, tmp_path)
