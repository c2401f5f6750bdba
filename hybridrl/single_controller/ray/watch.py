"""Tells at once that one of Ray's own processes has ended.

Without its GCS, a program seems to run on: Ray looks for it for a minute and then ends the program without a reason.
Without its raylet, calls to workers that run already still work for up to 10 s, and anything else waits. A run that
trains uses this time to stop with a checkpoint.
"""

import os
import select
import threading
import time
from collections.abc import Mapping

from hybridrl.notify import notify
from hybridrl.utils.termination import request_stop

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
                name = self._names[descriptor]
                saves = request_stop(f"the end of Ray's process {name}")
                follows = (
                    "the run stops after this step and saves a checkpoint, if its workers still answer, and this "
                    f"program ends after {_LEFT_S:.0f} s at the latest"
                    if saves
                    else f"this program cannot continue and ends within {_LEFT_S:.0f} s"
                )
                notify(
                    f"Ray's process {name} was killed or crashed: {follows}. A run resumes from its last checkpoint "
                    f"with the same command. Ray's logs are in {self._logs}",
                    "error",
                )
