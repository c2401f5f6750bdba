"""An event loop in a thread of its own, for programs whose main thread stays synchronous."""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class LoopThread:
    """Runs coroutines and functions on one event loop, in a daemon thread that starts with the first of them.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine and return its result. It is cancelled where the waiting is interrupted."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._started())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on the loop, between its other work, and return its result."""

        async def call() -> T:
            return function(*args, **kwargs)

        return self.run(call())

    def close(self) -> None:
        """End the loop. What still runs on it is left where it stands."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name=self.name, daemon=True).start()
        return self._loop


async def in_daemon_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a daemon thread of its own and return its result.

    The threads of `asyncio.to_thread` are joined when the interpreter ends, so that a function that hangs would hold
    the program. A function that is no longer waited for runs on, and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return  # nobody waits any more
        if error is None:
            result.set_result(value)  # type: ignore[arg-type]
        else:
            result.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = context.run(function, *args, **kwargs)
        except (SystemExit, KeyboardInterrupt, StopIteration) as raised:  # would end the loop, or cannot be passed on
            error = RuntimeError(f"{type(raised).__name__} in a thread: {raised}")
            error.__cause__ = raised
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name=getattr(function, "__name__", "call"), daemon=True).start()
    return await result
