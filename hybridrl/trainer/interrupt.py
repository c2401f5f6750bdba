"""Stop requests: a first signal ends the run after the current step, with a checkpoint.

A second SIGTERM ends it earlier, without the step in progress where its weights have not changed yet; a third one, or a
second Ctrl-C, at once.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hybridrl.notify import keeping_output, notify, redirect_lost_output
from hybridrl.processes.forked import default_in_children, inherited_by_children
from hybridrl.utils.termination import COPY_S, is_ours, listening, settle

_HANGUP_LOG = "after_hangup.log"
_SECOND: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_IGN,
    signal.SIGUSR1: signal.SIG_IGN,
    signal.SIGUSR2: signal.SIG_IGN,
}  # what follows the first signal
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


class StepAbandoned(BaseException):
    """A second request to stop: the step in progress is left, and the last complete one is saved."""


class StopRequest:
    """Listens for signals that ask the run to stop while it is entered.

    They are SIGINT, SIGTERM, SIGHUP (the terminal or the connection is gone), and SIGUSR1 and SIGUSR2, with which batch
    systems warn that the time is almost over. `requested` holds the name of the first signal, or why the program itself
    asked (`hybridrl.utils.termination.request_stop`). A second SIGTERM raises
    `StepAbandoned` in a block of `abandonable`, or when the next one begins. A third SIGTERM or a second SIGINT gets
    Python's default handler, so a step that hangs can still be interrupted. A signal that follows so fast that it is a
    copy does not count. Further signals of the other kinds are ignored: the shell and the system each send a SIGHUP
    when a terminal closes. A signal that this process ignores, such as SIGHUP under `nohup`, stays ignored, and a
    handler of SIGUSR1 or SIGUSR2 that the program has set stays set.

    Args:
        folder: the run's folder. Output that has no reader any more goes to `after_hangup.log` in it.

    Attributes:
        requested: the first signal, or the program's reason; None: the run goes on.
        abandons: a second SIGTERM came.
    """

    def __init__(self, folder: Path) -> None:
        self.requested: str | None = None
        self.abandons = False
        self._previous: dict[signal.Signals, Any] = {}
        self._requested_at = 0.0
        self._may_abandon = False
        self._output = contextlib.ExitStack()
        self._log = folder / _HANGUP_LOG

    def __enter__(self) -> "StopRequest":
        self._output.enter_context(keeping_output(self._log))
        self._output.enter_context(listening(self._on_request))
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread may handle signals: the program that started this one decides
        for name in _SECOND:
            handler = signal.getsignal(name)
            free = handler == signal.SIG_DFL or is_ours(handler)
            if handler != signal.SIG_IGN and (name not in _WARNINGS or free):
                self._previous[name] = signal.signal(name, self._on_signal)
        default_in_children(self._previous)  # loaders of data, and what the user's code forks, end when they are told
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            settle()
        inherited_by_children(name for name, handler in self._previous.items() if not is_ours(handler))
        for name, handler in self._previous.items():
            signal.signal(name, handler)
        self._output.close()

    @contextlib.contextmanager
    def abandonable(self) -> Iterator[None]:
        """Within the block, the weights are those of the last complete step: a second request may leave the next one.

        Raises:
            StepAbandoned: that request came, also before the block.
        """
        if self.abandons:
            raise StepAbandoned
        self._may_abandon = True
        try:
            yield
        except KeyboardInterrupt as error:
            if not self.abandons:
                raise
            raise StepAbandoned from error
        finally:
            self._may_abandon = False

    def _on_request(self, reason: str) -> None:
        """Stop for another reason than a signal; called in any thread (`hybridrl.utils.termination.request_stop`)."""
        if self.requested is None:
            self.requested, self._requested_at = reason, time.monotonic()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            self._again(signal.Signals(number))
            return
        self.requested, self._requested_at = signal.Signals(number).name, time.monotonic()
        if number == signal.SIGHUP:
            redirect_lost_output()
        for name in self._previous:
            if name not in COPY_S:
                signal.signal(name, _SECOND[name])
        sooner = "once more ends it" if number == signal.SIGINT else "SIGTERM once more leaves the step, Ctrl-C ends it"
        notify(f"{self.requested}: the run stops after this step and saves a checkpoint; {sooner} at once")

    def _again(self, name: signal.Signals) -> None:
        """Stop sooner, by a signal that is no copy of the one before."""
        now = time.monotonic()
        if now - self._requested_at < COPY_S.get(name, 0):
            return
        if name == signal.SIGTERM and not self.abandons:
            self.abandons, self._requested_at = True, now
            if self._may_abandon:
                raise KeyboardInterrupt  # the one exception that Ray lets a handler raise while it waits
            notify("SIGTERM again: the weights are changing or being saved; the run ends as soon as they are whole")
            return
        signal.signal(name, _SECOND[name])
        os.kill(os.getpid(), name)
