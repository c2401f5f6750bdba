"""Exit codes of child processes, which Ray discards in some clusters."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_CHILD_SUBREAPER = 36
_SIZE_OF_SIGACTION = 512  # more than any system's


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
