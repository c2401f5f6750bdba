"""Settings that processes inherit from Ray's: discarded exit codes, and signals that ask the whole job to stop."""

from __future__ import annotations

import ctypes
import os
import signal

from hybridrl.processes.forked import keep_blocked_in_children

_PR_SET_CHILD_SUBREAPER = 36
_SIZE_OF_SIGACTION = 512  # more than any system's
#: They ask the controller to stop, but batch systems send them to every process of the job. Ray blocks SIGINT itself.
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
#: what a worker gives back to the programs that it starts: `Popen.terminate` has to end them
_ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_shielded = False


def block_stop_signals() -> None:
    """Keep signals that stop the job from what this thread starts: those processes live on while the run saves."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    keep_blocked_in_children(STOP_SIGNALS)


def _obey_stop_signals() -> None:
    library = ctypes.CDLL(None)
    for number in _ENDING:
        library.signal(number, None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def ignore_stop_signals() -> None:
    """Make this process, and no program that it starts, indifferent to the signals that `block_stop_signals` blocked.

    They are unblocked, because a blocked signal stays blocked in every program that is started, whose
    `Popen.terminate()` would do nothing. The handler does nothing and is one of C, which every thread may set; it is
    lost in programs that are started, and in forked processes.
    """
    global _shielded
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    nothing = ctypes.cast(library.abs, ctypes.c_void_p)  # a function of C that takes a number and has no effect
    for number in _ENDING:
        library.signal(number, nothing)
    if not _shielded:
        os.register_at_fork(after_in_child=_obey_stop_signals)
        _shielded = True
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def keep_exit_codes(adopt_orphans: bool = True) -> None:
    """Undo that SIGCHLD is ignored in this process, so that the exit codes of its children are not lost.

    While SIGCHLD is ignored, every child process seems to end with exit code 0, and programs started from here inherit
    that. Ray ignores it in drivers and workers if its subreaper is on
    (`RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper`). Unlike `signal.signal`, this function works in
    every thread.

    Args:
        adopt_orphans: whether this process stays the subreaper that Ray made it. It then has to wait for processes
            that it did not start; otherwise they stay in the process table until it ends.
    """
    library = ctypes.CDLL(None)
    action = ctypes.create_string_buffer(_SIZE_OF_SIGACTION)
    library.sigaction(signal.SIGCHLD, None, action)
    if ctypes.c_void_p.from_buffer(action).value != int(signal.SIG_IGN):  # the handler is the first field
        return
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal(signal.SIGCHLD, int(signal.SIG_DFL))
    if not adopt_orphans and hasattr(library, "prctl"):
        library.prctl(_PR_SET_CHILD_SUBREAPER, 0)
