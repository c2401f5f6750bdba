"""Sends traces while the run goes on. A service that is slow or fails costs traces, never the run."""

from __future__ import annotations

import importlib.util
import pickle
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.config.schema.rollout import TraceConfig
from hybridrl.errors import RolloutError
from hybridrl.notify import notify
from hybridrl.observe.traces.sample_trace import TraceBackend, trace_of
from hybridrl.registry import TRACES

_KEY = "actor_rollout_ref.rollout.trace"
_WAITING = 20_000  # traces that wait for the service; further ones are left out
_WAITING_BYTES = 2**30  # of these traces together
_CLOSE_S = 60.0  # how long the end of a run waits for what is pending
_FAILURES = 3  # in a row; then the service is not used any more


class Traces:
    """The traces of a run.

    Args:
        settings: `rollout.trace`.
        folder: of the run.

    Raises:
        RolloutError: the service cannot be used.
    """

    def __init__(self, settings: TraceConfig, folder: Path) -> None:
        assert settings.backend is not None
        check_backend(settings.backend)
        self.prompts = settings.max_samples_per_step_per_worker
        self._settings = settings
        project, experiment = settings.project_name or "hybridrl", settings.experiment_name or "default"
        try:
            self._backend: TraceBackend = TRACES.get(settings.backend)(project, experiment, folder)
        except Exception as error:  # those of services have no common base
            raise RolloutError(f"{_KEY}.backend={settings.backend}: it could not be opened: {error!r}") from error
        self._queue: queue.Queue[tuple[Mapping[str, Any], float, dict[str, Any], int] | None] = queue.Queue(_WAITING)
        self._left_out, self._failed, self._bytes = 0, 0, 0
        self._lock = threading.Lock()  # of the bytes
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def send(self, rows: Sequence[Mapping[str, Any]], step: int, validate: bool) -> None:
        """Send samples as dumps have them; returns at once."""
        now, attributes = time.time(), {"step": step, "validate": validate}
        for row in rows:
            size = len(pickle.dumps(row, pickle.HIGHEST_PROTOCOL))
            if not self._take_bytes(size):
                self._left_out += 1
                continue
            try:
                self._queue.put_nowait((row, now, attributes, size))
            except queue.Full:
                self._give_bytes(size)
                self._left_out += 1
        if self._left_out:
            notify(
                f"traces: {self._settings.backend} is slower than the run, {self._left_out} traces are left out so "
                f"far; set {_KEY}.max_samples_per_step_per_worker",
                "warning",
                once=True,
            )

    def _take_bytes(self, size: int) -> bool:
        """Reserve memory for a waiting trace; return False if the queue would exceed its limit."""
        with self._lock:
            if self._bytes + size > _WAITING_BYTES:
                return False
            self._bytes += size
            return True

    def _give_bytes(self, size: int) -> None:
        with self._lock:
            self._bytes -= size

    def close(self) -> None:
        """Wait until everything is sent, at most a minute."""
        end = time.monotonic() + _CLOSE_S
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            self._left_out += 1
        self._thread.join(max(0.0, end - time.monotonic()))
        unsent = self._left_out + (self._queue.qsize() if self._thread.is_alive() else 0)
        if unsent:
            notify(f"traces: {unsent} were not sent to {self._settings.backend}", "warning")

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._give_bytes(item[3])
            if self._failed >= _FAILURES:
                self._left_out += 1
                continue
            row, now, attributes, _ = item
            try:
                self._backend.send(trace_of(row, now, self._settings.token2text, attributes))
                self._failed = 0
            except Exception as error:
                self._fail(error)
        try:
            self._backend.close()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed += 1
        self._left_out += 1
        rest = "; it is not used any more" if self._failed == _FAILURES else ""
        notify(f"traces: {self._settings.backend} failed{rest}: {error!r}", "warning")


def check_backend(name: str) -> None:
    """Refuse a service that cannot be used.

    Raises:
        RolloutError: it is unknown, or its package is not installed.
    """
    metadata = TRACES.metadata(name)
    if not TRACES.knows(name):
        TRACES.get(name)  # raises: it lists the known ones
    missing = [package for package in metadata.packages if not _installed(package)]
    if missing:
        raise RolloutError(
            f"{_KEY}.backend={name} needs the package {', '.join(missing)}, which is not installed: {metadata.install}"
        )


def _installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
