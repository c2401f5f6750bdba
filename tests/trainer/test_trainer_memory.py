"""What is told about memory before the first step, with the figures of a device in place of a worker group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.trainer.ppo.memory import MemoryReport
from hybridrl.workers.model_worker import micro_batching


def report(total: float, *used: float) -> MemoryReport:
    """A report of a device on which so much is in use at each measurement."""
    facts = iter([{"total_gb": total, "free_gb": total - value} for value in used])
    group: Any = SimpleNamespace(device_memory=lambda: [next(facts)])
    return MemoryReport(group)


def test_an_engine_that_does_not_fit_next_to_the_optimizer_is_told_with_figures(capsys: pytest.CaptureFixture) -> None:
    """3 B parameters on 80 GB: the models leave enough for half of the device, and their Adam states do not."""
    memory = report(80.0, 18.6, 43.4)
    loaded = memory.note("models loaded")
    states = memory.note("with optimizer states") - loaded
    memory.check_fits(loaded, 0.0, 0.5)
    assert capsys.readouterr().err == ""
    memory.check_fits(loaded, states, 0.5)
    told = capsys.readouterr().err
    for figure in ("80.0 GiB", "85.4", "18.6", "24.8", "40.0", "gpu_memory_utilization=0.5", "optimizer_offload"):
        assert figure in told
    assert "to 0.43 or less" in told  # 80 - 18.6 - 24.8 - 2 GiB
    memory.check_fits(loaded, states, 0.43)
    assert capsys.readouterr().err == ""


def test_micro_batches_are_limited_in_tokens() -> None:
    """A number of sequences alone would let the logits of long ones take any amount of memory."""
    limits = micro_batching(8, dynamic=False, max_tokens=16384)
    assert (limits.size, limits.max_tokens) == (8, 16384)
    limits = micro_batching(8, dynamic=True, max_tokens=16384)
    assert (limits.size, limits.max_tokens) == (None, 16384)
