"""A replica that was killed leaves no process behind that holds its memory."""

import contextlib
import os
import select
import signal
import threading

#: the replica's process, which everything it started shall not outlive
OWNER_VARIABLE = "HYBRIDRL_REPLICA_PID"


def end_with_owner() -> None:
    """End this process, and the engine's core that started it, as soon as the replica is gone.

    vLLM's processes notice the end of their parent when they next talk to it; a replica that was killed would leave
    its memory taken.
    """
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if not owner or owner == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    parent = os.getppid()  # now, for later it may be whoever adopts orphans
    try:
        owners_end = os.pidfd_open(owner)
        core = None if parent == owner else os.pidfd_open(parent)
    except OSError:
        os._exit(1)

    def watch() -> None:
        select.select([owners_end], [], [])
        try:
            if core is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(core, signal.SIGKILL)
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="hybridrl-end-with-owner", daemon=True).start()
