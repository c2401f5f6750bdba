"""Stop requests: a first signal ends the run after the current step, with a checkpoint; a second ends it at once."""

import contextlib
import signal
import threading
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
}  # what follows the first signal


class StopRequest:
    """Listens for SIGINT, SIGTERM and SIGHUP (the terminal or the connection is gone) while it is entered.

    `requested` holds the name of the first signal. A second signal gets Python's default handler, so a step that hangs
    can still be interrupted; but further SIGHUPs are ignored, because the shell and the system each send one when a
    terminal closes. A signal that this process ignores, such as SIGHUP under `nohup`, stays ignored.

    Args:
        folder: the run's folder. Output that has no reader any more goes to `after_hangup.log` in it.
    """

    def __init__(self, folder: Path) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._output = contextlib.ExitStack()
        self._log = folder / _HANGUP_LOG

    def __enter__(self) -> "StopRequest":
        self._output.enter_context(keeping_output(self._log))
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread may handle signals: the program that started this one decides
        for name in _SECOND:
            if signal.getsignal(name) != signal.SIG_IGN:
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
        self.requested = signal.Signals(number).name
        if number == signal.SIGHUP:
            redirect_lost_output()
        for name in self._previous:
            signal.signal(name, _SECOND[name])
        notify(f"{self.requested}: the run stops after this step and saves a checkpoint; once more ends it at once")
