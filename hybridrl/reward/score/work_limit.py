"""A limit of the processor time that a scorer's own work takes."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from hybridrl.scored import Reason, UnscoredError

_AGAIN_S = 0.05  # the library under the limit may have caught what ended it


class _WorkExpiry(BaseException):
    """Ends the work. It is no `Exception`, which libraries catch."""


@contextlib.contextmanager
def limited_work(seconds: float, work: str) -> Iterator[None]:
    """Within the context, the main thread computes for at most so many seconds of processor time.

    Time in which the process is stopped, or waits for a core, does not count, and neither does that of other threads.
    In another thread than the main one there is no limit: Python runs handlers of signals in the main thread alone.

    Args:
        seconds: of processor time, of user and system.
        work: its name, for the message.

    Raises:
        UnscoredError: the limit was exceeded.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    end = time.thread_time() + seconds
    running = True

    def on_signal(number: int, frame: Any) -> None:
        remaining_s = end - time.thread_time()
        if not running:
            return
        signal.setitimer(signal.ITIMER_PROF, max(remaining_s, _AGAIN_S))  # it counts all threads
        if remaining_s <= 0:
            raise _WorkExpiry

    before = signal.signal(signal.SIGPROF, on_signal)
    outer = signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        try:
            yield
        finally:
            running = False
    except _WorkExpiry:
        raise UnscoredError(
            Reason.TIMEOUT, f"{work} took more than {seconds:g} s of processor time, so the answer is not judged"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, *outer)
        signal.signal(signal.SIGPROF, before)
