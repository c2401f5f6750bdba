"""Whether processes that start get on: a limit of time alone is too short on a busy machine, or too long elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

_COMPUTED_S = 1.0  # processor time since the last movement that counts as one; idle servers take a little, too
_WAITING = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)  # for a core or a disk
_LOGS = (".log", ".out", ".err")


class Movement:
    """Looks at processes and their logs, each time that it is asked.

    Something moves if a process begins or ends, a log grows, the processes have computed for a second, or one of them
    waits for a core or a disk in two looks one after the other.

    Args:
        processes: returns those that run now.
        logs: returns the folder of their logs, which need not exist yet; None: there is none.
        chatty: beginnings of names of logs that grow while nothing gets on.
    """

    def __init__(
        self,
        processes: Callable[[], Iterable[psutil.Process]],
        logs: Callable[[], Path | None] = lambda: None,
        chatty: Iterable[str] = (),
    ) -> None:
        self._processes = processes
        self._logs = logs
        self._chatty = tuple(chatty)
        self.began = self._moved = time.monotonic()
        self._ids: set[int] = set()
        self._computed = 0.0
        self._bytes = 0
        self._waited = False

    def still_s(self) -> float:
        """Look, and return for how many seconds nothing has moved."""
        ids, computed, waits = set(), 0.0, False
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                times, status = process.cpu_times(), process.status()
                if status == psutil.STATUS_ZOMBIE:
                    continue
                ids.add(process.pid)
                computed += times.user + times.system
                waits = waits or status in _WAITING
        size = self._size()
        moved = ids != self._ids or size != self._bytes or computed - self._computed >= _COMPUTED_S
        now = time.monotonic()
        if moved or (waits and self._waited):
            self._moved, self._ids, self._computed, self._bytes = now, ids, computed, size
        self._waited = waits
        return now - self._moved

    @property
    def count(self) -> int:
        """Number of processes at the last movement."""
        return len(self._ids)

    def _size(self) -> int:
        total = 0
        for file in self._log_files():
            with contextlib.suppress(OSError):
                total += 0 if file.name.startswith(self._chatty) else file.stat().st_size
        return total

    def _log_files(self) -> list[Path]:
        folder = self._logs()
        with contextlib.suppress(OSError):
            return [file for file in folder.iterdir() if file.suffix in _LOGS] if folder else []
        return []

    def last_lines(self, count: int = 20, of: Iterable[str] = ()) -> str:
        """Return the end of the log that was written last, as the end of a message.

        Args:
            count: number of lines.
            of: names of programs; where they have logs, one of these.
        """
        written: dict[Path, float] = {}
        for file in self._log_files():
            with contextlib.suppress(OSError):
                if file.stat().st_size:
                    written[file] = file.stat().st_mtime
        if not written:
            return f"\n{self._logs() or 'The folder of its logs'} has no logs"
        programs = tuple(of)
        newest = max(written, key=lambda file: (file.name.startswith(programs), written[file]))
        lines = newest.read_text(errors="replace").splitlines()[-count:]
        return f"\nThe end of {newest}:\n  " + "\n  ".join(lines)
