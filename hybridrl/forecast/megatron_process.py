"""A process that computes forecasts of Megatron engines, and ends after some time without requests.

It sees no GPU, so it takes nothing of a device's memory, and it has no process group, so it can be any rank of any
layout.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import subprocess
import sys
import threading
import traceback
from typing import IO, Any

from hybridrl.errors import UserError

# A process that has imported Megatron-core answers at once; the keys that make a run fit take many answers.
_IDLE_S = 60.0


class _Process:
    """The process, which starts with the first call and again when it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def call(self, request: Any) -> Any:
        with self._lock:
            for last in (False, True):
                if self._process is None:
                    self._process = _start()
                try:
                    return self._answer(self._process, request)
                except (BrokenPipeError, EOFError) as error:  # it ended, perhaps because it was idle
                    status = self._process.wait()
                    self._process = None
                    if last:
                        raise RuntimeError(f"the process that forecasts memory ended with status {status}") from error
        raise AssertionError

    def _answer(self, process: subprocess.Popen[bytes], request: Any) -> Any:
        assert process.stdin is not None and process.stdout is not None
        pickle.dump(request, process.stdin)
        process.stdin.flush()
        forecast, error = pickle.load(process.stdout)
        if error is not None:
            raise error
        return forecast

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process = None


_process = _Process()
atexit.register(_process.close)


def call(request: Any) -> Any:
    """Return the result of `hybridrl.forecast.megatron_rank.compute` for a request, or raise its error.

    Raises:
        RuntimeError: the process failed with an error that is no `UserError`; the message has its traceback.
    """
    return _process.call(request)


def _start() -> subprocess.Popen[bytes]:
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    # Ctrl-C does not reach it; it ends with its standard input.
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, start_new_session=True
    )


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    from hybridrl.forecast.megatron_rank import compute

    while select.select([requests], [], [], _IDLE_S)[0]:
        try:
            request = pickle.load(requests)
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
        pickle.dump((forecast, problem), answers)
        answers.flush()


def _main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is printed is no answer
    _serve(os.fdopen(sys.stdin.fileno(), "rb", buffering=0), answers)


if __name__ == "__main__":
    _main()
