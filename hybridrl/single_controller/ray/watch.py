"""Tells at once that one of Ray's own processes has ended.

Without its GCS, a program seems to run on: Ray looks for it for a minute and then ends the program without a reason.
Without its raylet, calls to workers that run already still work, and anything else waits.
"""

import os
import select
import threading
import time
from collections.abc import Mapping

from hybridrl.notify import notify

_LEFT_S = 10.0  # to end in order, after the end of the first process


class ClusterWatch:
    """Watches processes of the cluster that this program started, in a thread. Without pidfds it does nothing.

    Args:
        processes: id of each process, by the name of its program.
        logs: the folder of their logs, for the message.
    """

    def __init__(self, processes: Mapping[str, int], logs: str) -> None:
        self._logs = logs
        self._names: dict[int, str] = {}
        self._wake_here, self._wake_there = os.pipe()
        for name, pid in processes.items():
            try:
                self._names[os.pidfd_open(pid)] = name
            except (AttributeError, OSError):  # not Linux, or it has just ended
                continue
        self._thread = threading.Thread(target=self._watch, name="ray-watch", daemon=True)
        self._thread.start()

    def dismiss(self) -> None:
        """Stop watching, because the cluster is about to end."""
        os.write(self._wake_there, b"x")
        self._thread.join()
        for descriptor in (self._wake_here, self._wake_there, *self._names):
            os.close(descriptor)

    def _watch(self) -> None:
        poll = select.poll()
        for descriptor in (self._wake_here, *self._names):
            poll.register(descriptor, select.POLLIN)
        deadline: float | None = None
        while True:
            left_ms = None if deadline is None else max(0, int(1000 * (deadline - time.monotonic())))
            ended = {descriptor for descriptor, _ in poll.poll(left_ms)}
            if self._wake_here in ended:
                return
            if not ended:
                os._exit(1)
            for descriptor in ended:
                poll.unregister(descriptor)
                deadline = deadline or time.monotonic() + _LEFT_S
                notify(
                    f"Ray's process {self._names[descriptor]} was killed or crashed: this program cannot continue and "
                    f"ends within {_LEFT_S:.0f} s. A run resumes from its last checkpoint with the same command. Ray's "
                    f"logs are in {self._logs}",
                    "error",
                )
