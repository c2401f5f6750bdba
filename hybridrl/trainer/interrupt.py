"""Stop requests: a first signal ends the run after the current step, with a checkpoint; a second ends it at once."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hybridrl.notify import keeping_output, notify, redirect_lost_output
from hybridrl.utils.forked import default_in_children, inherited_by_children

_HANGUP_LOG = "after_hangup.log"
_SECOND: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_IGN,
    signal.SIGUSR1: signal.SIG_IGN,
    signal.SIGUSR2: signal.SIG_IGN,
}  # what follows the first signal
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
#: copies of one request: `timeout` and launchers send the signal to the program and to its group, one after the other
_COPY_S = {signal.SIGINT: 0.5, signal.SIGTERM: 5.0}


class StopRequest:
    """Listens for signals that ask the run to stop while it is entered.

    They are SIGINT, SIGTERM, SIGHUP (the terminal or the connection is gone), and SIGUSR1 and SIGUSR2, with which batch
    systems warn that the time is almost over. `requested` holds the name of the first signal. A second SIGINT or
    SIGTERM gets Python's default handler, so a step that hangs can still be interrupted, unless it follows so fast that
    it is a copy of the first. Further signals of the other kinds are ignored: the shell and the system each send a
    SIGHUP when a terminal closes. A signal that this process ignores, such as SIGHUP under `nohup`, stays ignored, and
    a handler of SIGUSR1 or SIGUSR2 that the program has set stays set.

    Args:
        folder: the run's folder. Output that has no reader any more goes to `after_hangup.log` in it.
    """

    def __init__(self, folder: Path) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._requested_at = 0.0
        self._output = contextlib.ExitStack()
        self._log = folder / _HANGUP_LOG

    def __enter__(self) -> "StopRequest":
        self._output.enter_context(keeping_output(self._log))
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread may handle signals: the program that started this one decides
        for name in _SECOND:
            handler = signal.getsignal(name)
            if handler != signal.SIG_IGN and (name not in _WARNINGS or handler == signal.SIG_DFL):
                self._previous[name] = signal.signal(name, self._on_signal)
        default_in_children(self._previous)  # loaders of data, and what the user's code forks, end when they are told
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        inherited_by_children(self._previous)
        for name, handler in self._previous.items():
            signal.signal(name, handler)
        self._output.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            self._again(signal.Signals(number))
            return
        self.requested, self._requested_at = signal.Signals(number).name, time.monotonic()
        if number == signal.SIGHUP:
            redirect_lost_output()
        for name in self._previous:
            if name not in _COPY_S:
                signal.signal(name, _SECOND[name])
        notify(f"{self.requested}: the run stops after this step and saves a checkpoint; once more ends it at once")

    def _again(self, name: signal.Signals) -> None:
        """End the program by a second signal that is no copy of the first."""
        if time.monotonic() - self._requested_at < _COPY_S.get(name, 0):
            return
        signal.signal(name, _SECOND[name])
        os.kill(os.getpid(), name)
