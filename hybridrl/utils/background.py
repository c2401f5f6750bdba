"""A call in a thread of its own, whose error is raised where its end is awaited."""

import threading
from collections.abc import Callable


class BackgroundCall:
    """Runs `work` in a thread that starts at once. The process does not end before the thread does.

    Args:
        work: takes nothing, and returns nothing.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="background call")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def done(self, wait: bool = False) -> bool:
        """Return whether the work has ended, well or not.

        Args:
            wait: return once it has.
        """
        self._thread.join(None if wait else 0)
        return not self._thread.is_alive()

    def result(self) -> None:
        """Wait for the end, and raise the error that `work` raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
