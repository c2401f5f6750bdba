"""Ends the processes of Ray that would keep running for a minute after the controller is killed.

Ray's processes end with the process that started them, but two helpers on each node first look for the dead cluster
for a minute. This script runs next to the controller and reads its raylet's id from its standard input. If that closes
without a dismissal, the controller is gone, and the remaining processes that the raylet and its workers started are
ended. The script imports only the standard library, so that it starts in milliseconds.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

_FAREWELL = "done"
_PATIENCE_S = 2.0
_LOOK_S = 5.0


def stat_of(pid: int | str) -> tuple[str, str, str]:
    """Return (parent's id, process group, start in the kernel's clock ticks) of a process; empty texts if it is gone.

    The start time distinguishes a process from a later one with the same id.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return fields[1], fields[2], fields[19]
    except (OSError, IndexError):
        return "", "", ""


def children_of(raylets: set[str]) -> dict[str, str]:
    """Return the start time of each process that one of the raylets started, by its id."""
    stats = {pid: stat_of(pid) for pid in os.listdir("/proc") if pid.isdigit()}
    return {pid: begun for pid, (parent, _, begun) in stats.items() if parent in raylets}


def orphans_of_workers(raylets: set[str]) -> set[str]:
    """Return the ids of what workers of the raylets started, and of these workers as far as they run.

    A worker that began a moment ago may never have been seen below its raylet. What it started has the raylet's id in
    its environment. What has left its worker's process group, as a daemon does, is not returned.
    """
    marks = {f"RAY_RAYLET_PID={pid}".encode() for pid in raylets}
    orphans: set[str] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        group = stat_of(pid)[1]
        if group and not marks.isdisjoint(_words_of(pid, "environ")):
            leader = _words_of(group, "cmdline")[0]
            if leader.startswith(b"ray::"):
                orphans |= {pid, group}
            elif not leader:  # it is gone
                orphans.add(pid)
    return orphans


def _words_of(pid: str, file: str) -> list[bytes]:
    """Read the words of a process' command or environment; an empty one where it is gone or another user's."""
    try:
        with open(f"/proc/{pid}/{file}", "rb") as opened:
            return opened.read().split(b"\0")
    except OSError:
        return [b""]


class Reaper:
    """The controller's side. Without /proc it does nothing.

    Args:
        raylets: ids of the raylets that this process started. Their processes are ended if this process is killed.
    """

    def __init__(self, raylets: list[int]) -> None:
        self._process: subprocess.Popen[str] | None = None
        if not raylets or not os.path.exists("/proc/self/stat"):
            return
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C
        )
        self._send("\n".join(map(str, raylets)))

    def dismiss(self) -> None:
        """Tell the script that the controller ends normally, so that it does nothing."""
        if self._process is not None and self._process.stdin is not None:
            self._send(_FAREWELL)
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
            self._process = None

    def _send(self, text: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the script was killed; Ray's own clean-up remains
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()


def main() -> None:
    """Track the processes that the raylets started until the controller ends, then end those that are left."""
    raylets: set[str] = set()
    watched: dict[str, str] = {}
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], _LOOK_S if watched else 0.5)
        if readable:
            text = os.read(sys.stdin.fileno(), 65536).decode()
            if _FAREWELL in text:
                return
            if not text:
                break
            raylets.update(text.split())
        watched = children_of(raylets) or watched
    time.sleep(_PATIENCE_S)
    orphans = orphans_of_workers(raylets)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        _, group, begun = stat_of(pid)
        # A worker leads a process group, in which its children are found even if the worker itself is gone.
        if watched.get(pid) == begun or group in watched or pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    main()
