"""A validation that runs next to training: new weights wait for its end, so that all its answers have one version."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from hybridrl.trainer.ppo.samples import Samples
from hybridrl.utils.background import BackgroundLoop, in_daemon_thread

T = TypeVar("T")
_LOOK_S = 0.1


@dataclass(frozen=True)
class ValidationResult:
    """A completed validation.

    Attributes:
        step: number of training steps that the weights have had.
        samples: the answers.
        metrics: see `hybridrl.trainer.ppo.validation.validate`.
        seconds: its wall time.
    """

    step: int
    samples: Samples
    metrics: dict[str, float]
    seconds: float


class ValidationLane(Generic[T]):
    """Runs one validation at a time in a thread of its own, while the caller trains on.

    The caller waits for its end before it sends new weights, and takes the result afterwards. An error is kept until
    the caller can handle it: training is in the middle of a step when it learns of it.

    Attributes:
        step: of the weights that are validated; None: no validation is unfinished or waits to be taken.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._loop: BackgroundLoop | None = None
        self._result: Future[T] | None = None
        self._error: BaseException | None = None

    def start(self, step: int, validate: Callable[[], T]) -> None:
        """Begin with a validation. It is given up where the process ends."""
        assert self.step is None, "one validation at a time"
        self._loop = self._loop or BackgroundLoop("validation")
        self._result = self._loop.submit(in_daemon_thread(validate))
        self.step = step

    def wait(self, gives_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the validation has ended, well or not.

        Args:
            gives_up: whether to wait no longer; it is called every tenth of a second.

        Returns:
            Whether it has ended. One that has not is given up: its requests are aborted, and its result is dropped.
        """
        while self._result is not None and not self._result.done():
            if gives_up():
                self._give_up()
                return False
            wait([self._result], _LOOK_S)
        return True

    def take(self) -> T | None:
        """Return the result of the validation, which has ended; None if there is none, or if it failed (`check`)."""
        result, self.step, self._result = self._result, None, None
        if result is None:
            return None
        self._error = result.exception()
        return result.result() if self._error is None else None

    def check(self) -> None:
        """Raise what the validation that was taken raised."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread. A validation that still runs is given up."""
        self._give_up()
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _give_up(self) -> None:
        if self._result is not None:
            self._result.cancel()
        self.step = self._result = None
