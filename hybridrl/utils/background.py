"""Work in threads of its own: a call whose error is raised where its end is awaited, an event loop, and its calls.

A call that nobody waits for any more is told so: what it waits for itself is ended (`ended_by`).
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

_END_S = 10.0


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


class BackgroundLoop:
    """An event loop in a thread of its own, which does not keep the process from ending.

    Args:
        name: of the thread.

    Attributes:
        is_closing: `close` was called, so that what still runs is cancelled.
    """

    def __init__(self, name: str) -> None:
        self.is_closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. It is cancelled where the waiting is interrupted."""
        future = self.submit(work)
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
        """Cancel what still runs, and end the thread."""
        self.is_closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_S)  # a coroutine may go on in spite of its cancellation

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks))
        finally:
            self._loop.close()


class WorkCancelled(BaseException):
    """Nobody waits for the work of this thread any more."""


class _Waiting:
    """The calls that end what a thread waits for.

    Attributes:
        is_cancelled: nobody waits for the thread any more.
    """

    def __init__(self) -> None:
        self.is_cancelled = False
        self._ends: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def add(self, end: Callable[[], object]) -> None:
        """Have `end` called by `cancel`, at once if that was called before."""
        with self._lock:
            self._ends.append(end)
            late = self.is_cancelled
        if late:
            end()

    def remove(self, end: Callable[[], object]) -> None:
        with self._lock:
            self._ends.remove(end)

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            ends = list(self._ends)
        for end in ends:
            end()


_waiting: contextvars.ContextVar[_Waiting | None] = contextvars.ContextVar("waiting", default=None)


@contextlib.contextmanager
def ended_by(end: Callable[[], object]) -> Iterator[None]:
    """Have `end` called if nobody waits for this thread's work any more, to end what the block waits for.

    It is called once, in another thread. In a thread that is not one of `in_daemon_thread` it never is.

    Raises:
        WorkCancelled: it was called, at the end of the block.
    """
    waiting = _waiting.get()
    if waiting is None:
        yield
        return
    waiting.add(end)
    try:
        yield
    finally:
        waiting.remove(end)
    if waiting.is_cancelled:
        raise WorkCancelled


async def in_daemon_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a daemon thread of its own and return its result.

    The threads of `asyncio.to_thread` are joined when the interpreter ends, so that a function that hangs would hold
    the program. A function that is no longer waited for runs to the end of its next block of `ended_by`; its result is
    dropped.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    context, waiting = contextvars.copy_context(), _Waiting()
    context.run(_waiting.set, waiting)

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return  # nobody waits any more
        if error is None:
            result.set_result(value)  # type: ignore[arg-type]
        else:
            result.set_exception(error)

    def run() -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = context.run(function, *args, **kwargs)
        except (SystemExit, KeyboardInterrupt, StopIteration) as raised:  # would end the loop, or cannot be passed on
            error = RuntimeError(f"{type(raised).__name__} in a thread: {raised}")
            error.__cause__ = raised
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name=getattr(function, "__name__", "call"), daemon=True).start()
    try:
        return await result
    except asyncio.CancelledError:
        waiting.cancel()
        raise
