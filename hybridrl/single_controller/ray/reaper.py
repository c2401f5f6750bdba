"""Ends what Ray would leave behind for a minute when the controller is killed.

Ray's processes end with the process that started them, but two helpers of each node first look for the dead cluster,
for a minute. This script, run beside the controller, reads their ids from its standard input. When that closes
without a farewell the controller is gone, and whichever of them is still there is ended. It imports nothing beyond
the standard library, to start in milliseconds.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

_FAREWELL = "done"
_PATIENCE_S = 2.0


def start_time(pid: int) -> str:
    """When a process began, in the kernel's clock ticks; tells it from a later one with the same id. Empty if it is
    gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""


class Reaper:
    """The controller's side. Where there is no /proc it does nothing.

    Args:
        pids: processes to end if this process is killed.
    """

    def __init__(self, pids: list[int]) -> None:
        self._process: subprocess.Popen[str] | None = None
        watched = [f"{pid} {begun}" for pid in pids if (begun := start_time(pid))]
        if not watched:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C
        )
        self._send("\n".join(watched))

    def dismiss(self) -> None:
        """The controller ends by itself: nothing is left to do."""
        if self._process is not None and self._process.stdin is not None:
            self._send(_FAREWELL)
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
            self._process = None

    def _send(self, text: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody ended the script; Ray's own clean-up remains
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()


def main() -> None:
    """Wait for the controller's end."""
    lines = [line.strip() for line in sys.stdin]
    if lines and lines[-1] == _FAREWELL:
        return
    time.sleep(_PATIENCE_S)
    for pid, begun in (line.split() for line in lines):
        if start_time(int(pid)) == begun:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    main()
