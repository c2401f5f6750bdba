"""Whether processes that start get on: a limit of time alone is too short on a busy machine, or too long elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from hybridrl.notify import notify

STILL_S = 30.0  # without any movement, a start is given up
USER_STILL_S = 120.0  # the same for what runs a user's code, which may wait for something elsewhere
_TELL_S = 30.0  # a start that takes this long is mentioned, and again each time it has taken as long
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
        io: what the processes read and write counts, too; not for servers that report to each other.
    """

    def __init__(
        self,
        processes: Callable[[], Iterable[psutil.Process]],
        logs: Callable[[], Path | None] = lambda: None,
        chatty: Iterable[str] = (),
        io: bool = False,
    ) -> None:
        self._processes = processes
        self._logs = logs
        self._chatty = tuple(chatty)
        self._io = io
        self.began = self._moved = time.monotonic()
        self._ids: set[int] = set()
        self._computed = 0.0
        self._bytes = 0
        self._waited = False

    def still_s(self) -> float:
        """Look, and return for how many seconds nothing has moved."""
        ids, computed, waits, size = set(), 0.0, False, self._size()
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                times, status = process.cpu_times(), process.status()
                if status == psutil.STATUS_ZOMBIE:
                    continue
                ids.add(process.pid)
                computed += times.user + times.system
                size += self._moved_bytes(process) if self._io else 0
                waits = waits or status in _WAITING
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

    def _moved_bytes(self, process: psutil.Process) -> int:
        """The bytes that a process has read and written so far, in files, pipes and most sockets."""
        with contextlib.suppress(psutil.Error, AttributeError):  # of another user, or not on Linux
            counters = process.io_counters()
            return int(counters.read_chars + counters.write_chars)
        return 0

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


class StartWatch:
    """Says whether to go on waiting for something that starts: as long as something moves. Long waits are mentioned.

    Args:
        awaited: the end of a sentence that says for what is waited.
        movement: looks at its processes.
        still_s: seconds without movement after which the start is given up; None: `STILL_S`, or `USER_STILL_S`.
        users: what starts runs a user's code.
        limit_s: seconds after which it is given up in any case, as the user has set it; None: no such limit.
    """

    def __init__(
        self,
        awaited: str,
        movement: Movement,
        still_s: float | None = None,
        limit_s: float | None = None,
        users: bool = False,
    ) -> None:
        self.movement = movement
        self._awaited, self._limit_s = awaited, limit_s
        default_s = USER_STILL_S if users else STILL_S
        self._still_s = default_s if still_s is None else still_s
        self._tell_s = _TELL_S

    @property
    def waited_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.movement.began

    def why_given_up(self) -> str | None:
        """Look, and return why nobody should wait any longer; None where the start goes on."""
        still, waited = self.movement.still_s(), self.waited_s
        if self._limit_s is not None and waited > self._limit_s:
            return f"the limit of {self._limit_s:g} s has passed"
        if still > self._still_s:
            return f"nothing has moved for {still:.0f} s"
        if waited > self._tell_s:
            self._tell_s *= 2
            notify(
                f"still starting: waiting for {self._awaited} for {waited:.0f} s ({self.movement.count} processes; the "
                f"last sign of progress {still:.0f} s ago). The run goes on waiting while something moves",
                "warning",
            )
        return None


def family(pid: int) -> list[psutil.Process]:
    """Return a process and everything that it has started."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def watch_of(awaited: str, pid: int, limit_s: float | None = None) -> StartWatch:
    """Return a watch of a process of this machine that runs a user's code, and of everything that it starts.

    Args:
        awaited: the end of a sentence that says for what is waited.
        pid: the process.
        limit_s: see `StartWatch`.
    """
    return StartWatch(awaited, Movement(lambda: family(pid), io=True), limit_s=limit_s, users=True)
