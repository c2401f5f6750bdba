"""Records what one process does: a trace of operations, a snapshot of GPU memory, or a range for Nsight Systems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridrl.notify import notify
from hybridrl.utils import device


@dataclass(frozen=True)
class ProfileRequest:
    """Request to record a profile.

    Attributes:
        tool: `torch`, `torch_memory` or `nsys`.
        role: whose processes they are; part of the files' names.
        step: of the run.
        folder: where to write.
        ranks: which ranks record; None: all.
        entries: of `torch_memory`, how many allocations are remembered.
    """

    tool: str
    role: str
    step: int
    folder: str
    ranks: Sequence[int] | None
    entries: int


class Profile:
    """A recording. Only one can run in a process, whatever roles it hosts."""

    _running: Profile | None = None

    def __init__(self, request: ProfileRequest, rank: int) -> None:
        self._request = request
        self._path = Path(request.folder) / f"step_{request.step}" / f"{request.role}_rank_{rank}"
        self._tracer: Any = None

    @classmethod
    def start(cls, request: ProfileRequest, rank: int) -> Profile | None:
        """Begin to record. Returns None if the process is recorded already, for another of its roles.

        Raises:
            UserError: the tool needs a GPU, and there is none.
        """
        if cls._running is not None:
            notify(f"{request.role} rank {rank} is profiled in {cls._running._path.name}, as both are one process")
            return None
        profile = cls(request, rank)
        profile._begin()
        cls._running = profile
        return profile

    def _begin(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._request.tool == "torch":
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if device.is_gpu() else []
            self._tracer = torch.profiler.profile(activities=kinds, record_shapes=True)
            self._tracer.start()
        elif self._request.tool == "torch_memory":
            device.record_memory(self._request.entries)
        else:
            device.start_capture(f"step {self._request.step}")

    def finish(self) -> str | None:
        """Stop, and return the file that was written; None for `nsys`, which writes its own."""
        type(self)._running = None
        device.synchronize()
        if self._tracer is not None:
            self._tracer.stop()
            path = self._path.with_name(self._path.name + ".json.gz")
            self._tracer.export_chrome_trace(str(path))
            return str(path)
        if self._request.tool == "torch_memory":
            path = self._path.with_name(self._path.name + ".pickle")
            device.write_memory(path)
            device.record_memory(0)
            return str(path)
        device.end_capture()
        return None
