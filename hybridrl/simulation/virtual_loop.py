"""An event loop whose clock jumps to the next event, so that hours of waiting take milliseconds."""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class HangError(RuntimeError):
    """Nothing is scheduled any more, and what was run is not done."""


class _ClockSelector:
    """Takes the place of the loop's selector: instead of waiting for a time, it sets the clock to it."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise HangError(f"nothing is scheduled after {self._loop.now:.3f} s, and the run is not over")
        self._loop.now += max(timeout, 0.0)
        if self._loop.now > self._loop.limit_s:
            raise HangError(f"the run is not over after {self._loop.limit_s:.0f} simulated seconds")
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without files, sockets and threads. `time` is the simulated time in seconds.

    Args:
        limit_s: a run that takes longer counts as one that waits for ever.

    Raises:
        HangError: from `run_until_complete`, where it would wait for ever.
    """

    def __init__(self, limit_s: float = math.inf) -> None:
        super().__init__()
        self.now = 0.0
        self.limit_s = limit_s
        self._selector = _ClockSelector(self)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.now

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none: nothing is waited for but the clock."""


def run_virtual(coroutine: Coroutine[Any, Any, T], limit_s: float = math.inf) -> tuple[T, float]:
    """Run a coroutine to its end, and cancel the tasks that it leaves.

    Args:
        coroutine: what is run.
        limit_s: a run that takes longer counts as one that waits for ever.

    Returns:
        Its result, and the simulated seconds.

    Raises:
        HangError: it waits for something that never happens.
    """
    loop = VirtualLoop(limit_s)
    try:
        return loop.run_until_complete(coroutine), loop.now
    finally:
        loop.limit_s = math.inf
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()
