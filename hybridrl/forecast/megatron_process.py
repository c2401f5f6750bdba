"""A process that computes forecasts of Megatron engines, and ends after some time without requests.

It sees no GPU, so it takes nothing of a device's memory, and it has no process group, so it can be any rank of any
layout.
"""

from __future__ import annotations

import atexit
import pickle
import threading
import traceback
from typing import Any

from hybridrl.errors import UserError
from hybridrl.processes.child import Child, end_with_run
from hybridrl.processes.frames import FrameConnection

# A process that has imported Megatron-core answers at once; the keys that make a run fit take many answers.
_IDLE_S = 60.0


class ForecastProcess:
    """The process, which starts with the first call and again when it has ended."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Its id; None where it does not run."""
        return None if self._child is None or self._child.has_ended else self._child.pid

    def call(self, request: Any) -> Any:
        """Return the result of `hybridrl.forecast.megatron_rank.compute` for a request, or raise its error.

        Raises:
            RuntimeError: the process failed with an error that is no `UserError`; the message has its traceback.
        """
        with self._lock:
            for is_last in (False, True):
                if self._child is None:
                    self._child = Child(__name__, variables={"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"})
                connection = FrameConnection(self._child.connection)
                try:
                    connection.send(pickle.dumps(request))
                    forecast, error = pickle.loads(connection.receive())
                except (OSError, EOFError) as caught:  # it ended, perhaps because it was idle
                    status = self._child.end()
                    self._child = None
                    if is_last:
                        raise RuntimeError(f"the process that forecasts memory ended with status {status}") from caught
                    continue
                if error is not None:
                    raise error
                return forecast
        raise AssertionError

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.end()
            self._child = None


PROCESS = ForecastProcess()
atexit.register(PROCESS.close)


def main(connection_fd: int, life_fd: int) -> None:
    """Compute forecasts until the run ends, or needs none for some time."""
    end_with_run(life_fd)
    connection = FrameConnection(connection_fd)
    from hybridrl.forecast.megatron_rank import compute

    while connection.arrives_within(_IDLE_S):
        try:
            request = pickle.loads(connection.receive())
        except EOFError:
            return
        forecast: Any = None
        problem: Exception | None = None
        try:
            forecast = compute(request)
        except UserError as error:
            problem = error
        except Exception:
            problem = RuntimeError(traceback.format_exc())
        connection.send(pickle.dumps((forecast, problem)))
