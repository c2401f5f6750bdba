"""Ends vLLM's processes when their replica is killed, so that none keeps its memory, and removes what they leave."""

import contextlib
import multiprocessing
import os
import select
import signal
import threading
from pathlib import Path

from hybridrl.rollout.vllm import leftovers

#: pid of the replica's process; everything it started ends with it
OWNER_VARIABLE = "HYBRIDRL_REPLICA_PID"


def end_with_owner() -> None:
    """End this process, and the engine's core that started it, as soon as the replica is gone.

    vLLM's processes notice the end of their parent only when they next communicate with it; until then they would keep
    the memory of a killed replica.
    """
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if not owner or owner == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    # Read now, because an orphan gets another parent. A forked process may have another parent than who asked for it.
    asker = multiprocessing.parent_process()
    parent = asker.pid if asker is not None and asker.pid is not None else os.getppid()
    try:
        owners_end = os.pidfd_open(owner)
        core = None if parent == owner else os.pidfd_open(parent)
    except OSError:
        os._exit(1)

    def watch() -> None:
        poll = select.poll()  # select() refuses descriptors above 1023
        poll.register(owners_end, select.POLLIN)
        poll.poll()
        try:
            if core is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(core, signal.SIGKILL)
            leftovers.remove(Path(os.environ.get(leftovers.FOLDER_VARIABLE, "/")))
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="hybridrl-end-with-owner", daemon=True).start()
