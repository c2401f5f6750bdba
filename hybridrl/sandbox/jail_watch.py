"""Watches the processes of a sandbox: how a program ended, what it had to wait for, and what it left.

Imported by `jail`, whose process has the standard library alone.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

KILLED = 128 + signal.SIGKILL
_POLL_S, _ANSWER_S = 0.005, 2.0
_SETUP_S = 30.0  # until the program starts
_MOST_WAIT = 10  # times the program's time, in which it may wait for a core
_LEAST_MORE_S = 0.05
_PAUSE_S = 0.5  # this process did not run for longer than that: it was stopped, or the machine is overloaded
#: faults and limits of a program are other signals; these others may send
_SENT = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def send(descriptor: int, message: dict[str, Any]) -> None:
    os.write(descriptor, (json.dumps(message) + "\n").encode())


class Watch:
    """Waits for the program's end, which another process reports.

    Args:
        child: the first process of the namespaces, or without namespaces the program.
        inner: what tells that it started and how it ended can be read here.
        ask: a byte that is written here asks the first process whether the program still runs.
        wall_s: seconds that the program may take.
        direct: the child is the program.
    """

    def __init__(self, child: int, inner: int, ask: int, wall_s: float, direct: bool) -> None:
        self._child, self._inner, self._ask, self._wall_s, self._direct = JailedChild(child), inner, ask, wall_s, direct
        self._reports: dict[str, Any] = {}
        self._rest = b""
        self.started: float | None = None

    def wait(self, ended: list[int], report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """The program's end, or `failed`.

        Args:
            ended: gets an item where this process is asked to end the program.
            report: sends a message to the caller: that the program has started, or gets more time.
        """
        begin = last = time.monotonic()
        checking, until = False, begin + _SETUP_S
        while True:
            # A stopped process must not take the time of its pause for the program's.
            now = time.monotonic()
            pause, last = now - last, now
            if pause > _PAUSE_S:
                until += pause
                self.started = self.started and self.started + pause
            if (end := self._end()) is not None:
                return end
            if ended:
                return {"failed": "the sandbox was asked to end the program"}
            if self.started is None and "started" in self._reports:
                self.started, until = now, now + self._wall_s
                report({"started": True})
            if now >= until and self.started is None:
                return {"failed": f"the program did not start within {_SETUP_S:g} s"}
            if now >= until and checking and "running" not in self._reports:
                return {"failed": "the first process of the sandbox does not run any more"}
            if now >= until and not checking:
                checking, until = True, now + _ANSWER_S
                self._ask_whether_it_runs()
            if checking and self.started is not None and (running := self._reports.pop("running", None)) is not None:
                checking, more = False, self._more_time(now - self.started, running)
                if more is None:
                    return {"time": True, "code": KILLED, "doubt": running["stopped"], "waited": running["waited"]}
                if now - self.started > _MOST_WAIT * self._wall_s:
                    return {"failed": f"the program had to wait for a core for {running['waited']:.1f} s"}
                until = now + more
                report({"more": more})
            time.sleep(_POLL_S)

    def _ask_whether_it_runs(self) -> None:
        if self._direct:
            self._reports["running"] = self._child.state(_descendants(os.getpid()))
        else:
            os.write(self._ask, b"?")

    def _more_time(self, seconds: float, running: dict[str, Any]) -> float | None:
        """The time that the program gets because it waited for a core; None: it has had its time.

        Whoever computes in many processes waits for itself: their processor time counts as time, too.
        """
        more = self._wall_s - (seconds - running["waited"])
        return more if more > _LEAST_MORE_S and running["cpu"] < self._wall_s and not running["stopped"] else None

    def _end(self) -> dict[str, Any] | None:
        """The program's end, or `failed`; None while it runs."""
        end = self._child.end()
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._inner, 65536):
                self._rest += part
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            self._reports |= json.loads(line)
        if "failed" in self._reports:
            return {"failed": self._reports["failed"]}
        if "ended" in self._reports:
            ended: dict[str, Any] = self._reports["ended"]
            return ended
        if end is None or (self._direct and "started" in self._reports):
            return end
        return {"failed": f"the first process of the sandbox ended with status {end['code']}"}


class JailedChild:
    """A child of this process: whether it was stopped, and how it ended.

    Args:
        pid: of the child.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stopped = False

    def end(self) -> dict[str, Any] | None:
        """Its end; None while it runs. Other processes below this one that have ended are reaped."""
        waited = _waited(self._pid, self._pid) if _has_ended(self._pid) else 0.0
        while True:
            pid, status, used = os.wait4(-1, os.WNOHANG | os.WUNTRACED)
            if pid == self._pid and os.WIFSTOPPED(status):
                self._stopped = True
            elif pid == self._pid:
                doubt = os.WIFSIGNALED(status) and os.WTERMSIG(status) in _SENT
                cpu = used.ru_utime + used.ru_stime
                return {"code": _code(status), "cpu": cpu, "waited": waited, "doubt": doubt}
            elif pid == 0:
                return None

    def state(self, pids: list[int]) -> dict[str, Any]:
        """Of its processes: the longest time in which one waited for a core, and the processor time of all, in seconds.

        Those that have lowered their own priority chose to wait.
        """
        waited, cpu, clock = [0.0], 0.0, os.sysconf("SC_CLK_TCK")
        nice = os.nice(0)
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{pid}/stat") as file:
                    words = file.read().rpartition(")")[2].split()  # from the third on, as proc(5) counts
                cpu += sum(map(int, words[11:15])) / clock
                if int(words[16]) <= nice and int(words[38]) == os.SCHED_OTHER:
                    waited += [_waited(pid, int(task)) for task in os.listdir(f"/proc/{pid}/task")]
        return {"waited": max(waited), "cpu": cpu, "stopped": self._stopped}


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it is not reaped."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _waited(pid: int, task: int) -> float:
    """Seconds in which a thread could have run, and waited for a core."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/task/{task}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def end_descendants() -> None:
    """Kill every process below this one, also those that left their group, until none is left."""
    while True:
        for pid in _children(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children(*parents: int) -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _parent(name) in parents]


def _descendants(pid: int) -> list[int]:
    """The processes below a process."""
    below, last = [], [pid]
    while last := _children(*last):
        below += last
    return below


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return -1


def _code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
