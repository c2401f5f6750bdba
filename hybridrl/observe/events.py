"""Events of a run besides its metrics: `events.jsonl`, one line per start, resume, notice, warning and end.

A run that is killed writes no end. The next start shows that the earlier one has none.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridrl.errors import UserError
from hybridrl.notify import listening
from hybridrl.observe import jsonl
from hybridrl.utils.urls import masked_text

EVENTS = "events.jsonl"
START, RESUME, END = "start", "resume", "end"
_began: contextvars.ContextVar[datetime.datetime | None] = contextvars.ContextVar("began", default=None)


@contextlib.contextmanager
def beginning() -> Iterator[None]:
    """A run begins with this context: the start event of the log that is opened in it has the time of now.

    Processes start and models load before a run has its folder, and that is wall time of the run, too.
    """
    token = _began.set(_now())
    try:
        yield
    finally:
        _began.reset(token)


class EventLog:
    """Writes the events of one start of a run. Every message of `notify` in that time is an event.

    Args:
        folder: the run's folder.
        step: returns the step that the run has reached.
        start_over: remove the events that are there, because another run begins in the folder.
    """

    def __init__(self, folder: str | Path, step: Callable[[], int], start_over: bool = False) -> None:
        self._step = step
        if start_over:
            (Path(folder) / EVENTS).unlink(missing_ok=True)
        self._file = jsonl.JsonLines(Path(folder) / EVENTS)
        self._lock = threading.RLock()  # a signal handler may tell something while its thread writes
        self._listening = listening(lambda text, level: self.write(level, text))

    def write(self, kind: str, text: str, at: datetime.datetime | None = None, **fields: Any) -> None:
        """Write one event.

        An event that cannot be written does not end the run: notices are on the standard error too, and the metrics
        report a disk that is full or a folder that is gone.

        Args:
            kind: `start`, `resume`, `end`, or the level of a notice.
            text: what happened, for a reader.
            at: when it happened; None: now.
            fields: further entries of the line.
        """
        time = (at or _now()).isoformat(timespec="seconds")
        event = {"time": time, "step": self._step(), "kind": kind, "text": text, **fields}
        # RuntimeError: a signal handler that writes while its thread does; ValueError: the file is closed
        with self._lock, contextlib.suppress(OSError, RuntimeError, UserError, ValueError):
            self._file.write(event)

    def __enter__(self) -> EventLog:
        self.write(
            START,
            "",
            _began.get(),
            command=[masked_text(word) for word in sys.argv],
            host=platform.node(),
            pid=os.getpid(),
        )
        self._listening.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.__exit__(None, None, None)
        with self._lock, contextlib.suppress(OSError):
            self._file.close()


@dataclass(frozen=True)
class RunStart:
    """One start of a run.

    Attributes:
        start: its first event.
        end: its last event of the kind `end`; None if it was killed or goes on.
        last: time of its last event.
        first_step, last_step: steps reached when it began to train, and by its last event.
    """

    start: Mapping[str, Any]
    end: Mapping[str, Any] | None
    last: str
    first_step: int
    last_step: int

    def seconds(self, until: float | None = None) -> float:
        """Return the wall time to its end, or to `until` (a time stamp) or its last event if it has no end."""
        begin, last = _timestamp(self.start["time"]), _timestamp(self.last)
        return max(last, until or 0.0) - begin if self.end is None else last - begin


def read_events(folder: str | Path) -> list[dict[str, Any]]:
    """Return the events of a run, oldest first; empty for a run of a version that wrote none.

    Raises:
        UserError: a line is damaged; the error names it.
    """
    path = Path(folder) / EVENTS
    return [event for event in jsonl.read(path) if "kind" in event] if path.is_file() else []


def sessions(events: Sequence[Mapping[str, Any]]) -> list[RunStart]:
    """Split events by the starts of the run."""
    starts = [number for number, event in enumerate(events) if event["kind"] == START]
    session_list = []
    for number, first in enumerate(starts):
        part = events[first : starts[number + 1] if number + 1 < len(starts) else None]
        resumed = next((event["step"] for event in part if event["kind"] == RESUME), 0)
        end = next((event for event in reversed(part) if event["kind"] == END), None)
        last_step = max(resumed, *(event["step"] for event in part))
        session_list.append(RunStart(part[0], end, part[-1]["time"], resumed, last_step))
    return session_list


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _timestamp(time: str) -> float:
    return datetime.datetime.fromisoformat(time).timestamp()
