"""Stop requests: a first signal ends the run after the current step, with a checkpoint; a second ends it at once."""

import signal
from types import FrameType, TracebackType

from hybridrl.notify import notify


class StopRequest:
    """Listens for SIGINT and SIGTERM while it is entered.

    `requested` holds the name of the first signal. A second signal gets Python's default handler, so a step that hangs
    can still be interrupted.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        for name in self.SIGNALS:
            self._previous[name] = signal.signal(name, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, handler in self._previous.items():
            signal.signal(name, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
        for name in self.SIGNALS:
            signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
        notify(f"{self.requested}: the run stops after this step and saves a checkpoint; once more ends it at once")
