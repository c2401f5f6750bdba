"""Signals that end a program: as Ctrl-C does, so that it ends what it has started, and then by the signal.

A run listens for them itself while it trains (`hybridrl.trainer.interrupt`). This is for the rest of a program: its
start, its end, and programs that do not train.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from hybridrl.notify import notify
from hybridrl.processes.forked import default_in_children, inherited_by_children

#: copies of one request: `timeout` and launchers send the signal to the program and to its group, one after the other
COPY_S = {signal.SIGINT: 0.5, signal.SIGTERM: 5.0}
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_settled = False
_listener: Callable[[str], None] | None = None


class Terminated(BaseException):
    """A signal asked the program to end. No Exception: nothing but `ending_in_order` handles it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)

    def end(self) -> NoReturn:
        """End this process by the signal, so that its exit status tells."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        signal.signal(self.signal, signal.SIG_DFL)
        os.kill(os.getpid(), self.signal)
        os._exit(128 + self.signal)  # blocked where this process was started


def settle() -> None:
    """Say that all is done but the end of the processes: a signal that arrives now changes the exit status no more."""
    global _settled
    _settled = True


@contextlib.contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Within the block, `request_stop` calls `listener`."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def request_stop(reason: str) -> bool:
    """Ask the run that trains in this process to stop after its step, as a signal does; return whether there is one."""
    listener = _listener
    if listener is not None:
        listener(reason)
    return listener is not None


def is_ours(handler: Any) -> bool:
    """Whether a handler is one of `ending_in_order`."""
    return getattr(handler, "__func__", None) is _Ending.on_signal


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Within the block, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 interrupt it as Ctrl-C does, and the block raises
    `Terminated`. A second one ends the process at once.

    A signal that this process ignores or that has a handler keeps it. Outside the main thread this does nothing.
    """
    global _settled
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _settled = False
    ending = _Ending()
    handled = [name for name in _ENDING if signal.getsignal(name) == signal.SIG_DFL]
    for name in handled:
        signal.signal(name, ending.on_signal)
    default_in_children(handled)
    try:
        yield
    except KeyboardInterrupt as error:
        if ending.number is None:
            raise
        raise Terminated(ending.number) from error
    finally:
        inherited_by_children(handled)
        for name in handled:
            signal.signal(name, signal.SIG_DFL)


class _Ending:
    def __init__(self) -> None:
        self.number: int | None = None  # of the signal that interrupted the block
        self._asked_at: float | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number), time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            if not _settled:
                self.number = number
                raise KeyboardInterrupt  # the one exception that Ray lets a handler raise while it waits
            notify(f"{name.name}: the run is over and its processes are ending; once more ends it at once")
        elif now - self._asked_at >= COPY_S[signal.SIGTERM]:
            Terminated(number).end()
