"""The time that a call takes against its limit, without the time that it waits for what has limits of its own.

Whoever limits a call gives it a `Clock` with `running`. What the call waits for stops the clock with `stopped`. A call
without a clock is not limited, and `stopped` does nothing.
"""

import contextlib
import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterator

_current: contextvars.ContextVar["Clock | None"] = contextvars.ContextVar("clock", default=None)


class Clock:
    """Counts the seconds of one call. It runs from the start, and stops while any thread of the call waits.

    Args:
        on_change: is called with True when it stops, and with False when it goes on.
    """

    def __init__(self, on_change: Callable[[bool], None] | None = None) -> None:
        self._lock = threading.RLock()
        self._on_change = on_change
        self._waiting = 0
        self._elapsed, self._since = 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds that count."""
        with self._lock:
            return self._elapsed + (0.0 if self._waiting else time.monotonic() - self._since)

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped now."""
        return self._waiting > 0

    def stop(self) -> None:
        """Stop; as often as it was stopped, it has to be continued."""
        with self._lock:
            if not self._waiting:
                self._elapsed += time.monotonic() - self._since
            self._waiting += 1
            if self._waiting == 1 and self._on_change is not None:
                self._on_change(True)

    def go_on(self) -> None:
        """Continue."""
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                self._since = time.monotonic()
                if self._on_change is not None:
                    self._on_change(False)


class OverlappingSeconds:
    """Counts the seconds in which at least one of several blocks runs, in any threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._seconds = self._since = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Count the seconds within this context."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            now = time.monotonic()
            if self._running:
                self._seconds += now - self._since
            self._since = now
            self._running += change

    def take(self) -> float:
        """Return the seconds since the previous call."""
        with self._lock:
            now = time.monotonic()
            seconds = self._seconds + (now - self._since if self._running else 0.0)
            self._seconds, self._since = 0.0, now
            return seconds


def current() -> Clock | None:
    """The clock of this call; None: the call is not limited."""
    return _current.get()


@contextlib.contextmanager
def running(clock: Clock) -> Iterator[Clock]:
    """Measure by `clock` all calls within this context, and the tasks and threads that copy its context."""
    token = _current.set(clock)
    try:
        yield clock
    finally:
        _current.reset(token)


@contextlib.contextmanager
def stopped() -> Iterator[None]:
    """The clock of this call is stopped within this context."""
    clock = _current.get()
    if clock is None:
        yield
        return
    clock.stop()
    try:
        yield
    finally:
        clock.go_on()


def _new_lock() -> None:
    """Another thread may have held the lock when this process was forked."""
    if (clock := _current.get()) is not None:
        clock._lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)
