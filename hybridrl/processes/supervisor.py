"""The parent of a process with the user's code (a reward function, an agent), which ends everything that it started.

Such code may start programs, and these others, in sessions of their own or with parents that have ended. The supervisor
adopts those that lose their parent (on Linux), so all of them stay below it in the process tree. It ends them when the
process ends, when the run asks for it, and when the run itself dies, even by SIGKILL. Adopted processes are reaped
here, so the process sees the exit codes of its own children as ever.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.002


def split_off(life_fd: int, close: Sequence[int], after: Callable[[], object] = lambda: None) -> None:
    """Fork. Returns in the new process, the reward process; its parent, the supervisor, never returns.

    Args:
        life_fd: a pipe whose other end the run holds open as long as the process may live.
        close: file descriptors that only the reward process keeps.
        after: called by the supervisor once everything has ended.
    """
    supervisor = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        os.setsid()  # a signal to the process group of the reward process must not reach the supervisor
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before the kernel was asked
            os._exit(1)
        os.close(life_fd)
        return
    try:
        for descriptor in close:
            os.close(descriptor)
        status = _wait(worker, life_fd)
        _end_descendants(worker)
        after()
        _end_like(status)
    finally:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "prctl"):  # Linux
        library.prctl(option, value)


def _wait(worker: int, life_fd: int) -> int | None:
    """Return the status that the reward process ended with; None if the run has ended, or ends it."""
    wake_read, wake_write = os.pipe()
    for descriptor in (wake_read, wake_write):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(wake_read, select.POLLIN)
    poll.register(life_fd, select.POLLIN)
    while True:
        status = _reap(worker)
        if status is not None:
            return status
        events = dict(poll.poll())
        if life_fd in events:
            return _reap(worker)
        with contextlib.suppress(BlockingIOError):
            os.read(wake_read, 4096)


def _reap(worker: int) -> int | None:
    """Take children that have ended out of the process table; returns the worker's status if it is one of them."""
    ended_with = None
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == worker:
                ended_with = status
            if pid == 0:
                break
    return ended_with


def _end_descendants(worker: int) -> None:
    """Kill everything below this process. Its descendants' orphans become its children, so none can get away."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    empty = 0
    while empty < 2:  # a process that changes its parent can be missed once
        pids = descendants(os.getpid())
        empty = 0 if pids else empty + 1
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if pids:
            time.sleep(_PAUSE_S)
        _reap(worker)


def descendants(root: int) -> list[int]:
    """Return the processes below `root` in the tree, without those that have ended; empty where there is no /proc."""
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent, *_ = file.read().rpartition(b")")[2].split()
                if state not in (b"Z", b"X"):
                    children[int(parent)].append(int(name))
    pids, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        pids += below
        waiting += below
    return pids


def _end_like(status: int | None) -> None:
    """End this process as the reward process ended, so that the run sees how."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the reward process has left its own
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else 1)
