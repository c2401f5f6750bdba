"""Executors of user code in sessions (tools, environments, simulated users): a thread each, with time limits."""

import asyncio
import contextlib
import contextvars
import inspect
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hybridrl.scored import Reason, UnscoredError
from hybridrl.utils import clock

_POLL_S = 0.05
_RESPONDS_S = 1.0  # an event loop that runs nothing for so long is blocked
#: threads with an event loop, and threads for single functions, of a process; abandoned ones do not count
MOST_LOOPS, MOST_CALLS = 512, 512

#: the session whose code runs
_caller: contextvars.ContextVar["SessionExecutor | None"] = contextvars.ContextVar("caller", default=None)


class CallTimeoutError(TimeoutError):
    """User code did not answer in time."""


class SessionExecutor:
    """An event loop for the calls of one session, in a thread that it has to itself until `stop`.

    Code that blocks or hangs delays no other session. What hangs in Python cannot be ended: its thread is abandoned,
    and the next call gets another one. Threads are used again by later sessions. Where a process has `MOST_LOOPS`
    already, sessions share them: a call that waits for its thread does not run out of time meanwhile, and it moves to
    another thread where this one is abandoned.

    Args:
        code: the called code, for messages.
    """

    def __init__(self, code: str) -> None:
        self._code = code
        self.loop: ExecutorLoop | None = None

    async def run(self, make: Callable[[], Any], limit_s: float) -> Any:
        """The result of `make()`, which is awaited if it can be. `make` runs in the executor's loop, and may block.

        Raises:
            CallTimeoutError: it took longer than the limit, without the time in `clock.stopped()`.
            UnscoredError: this process cannot have one more thread, or open one more file.
        """
        while True:
            if self.loop is None:
                self.loop = LOOPS.lease(self._code)
            loop = self.loop
            measured = clock.Clock()
            begun = threading.Event()

            async def call(measured: clock.Clock = measured, begun: threading.Event = begun) -> Any:
                begun.set()
                measured.go_on()
                try:
                    result = make()
                    return await result if inspect.isawaitable(result) else result
                finally:
                    measured.stop()  # another call may have the thread before this result is passed on

            token = _caller.set(self)
            measured.stop()  # until the thread is free
            try:
                with clock.running(measured):
                    future = asyncio.wrap_future(loop.submit(call))
            finally:
                _caller.reset(token)
            if await self._ended(future, loop, measured, begun, limit_s):
                break
            future.cancel()
            if self.loop is loop:
                self.loop = None
        result, error = future.result()
        if error is not None:
            raise error
        return result

    async def _ended(
        self,
        future: "asyncio.Future[Any]",
        loop: "ExecutorLoop",
        measured: clock.Clock,
        begun: threading.Event,
        limit_s: float,
    ) -> bool:
        """Wait for a call; False where its thread was abandoned before the call began."""
        waiting = time.monotonic()
        while True:
            remaining = limit_s - measured.seconds if begun.is_set() else _POLL_S
            if (await asyncio.wait([future], timeout=max(remaining, _POLL_S)))[0]:
                return True
            if not begun.is_set() and time.monotonic() - waiting > limit_s:
                waiting = time.monotonic()
                if not await loop.responds():  # the session that blocks it may have ended, and nobody else looks
                    LOOPS.abandon(loop)
            if loop.is_abandoned and not begun.is_set():
                return False
            if measured.is_stopped or measured.seconds < limit_s:
                continue
            future.cancel()
            if not await loop.responds():
                LOOPS.abandon(loop)
                if self.loop is loop:
                    self.loop = None
            raise CallTimeoutError(f"{self._code} did not answer within {limit_s:g} s")

    def stop(self) -> None:
        """End what the session's code still does, and give the thread back."""
        if self.loop is not None:
            LOOPS.give_back(self.loop, self)
            self.loop = None


class ExecutorLoop:
    """An event loop in a thread of its own, which does not keep the process from ending.

    Attributes:
        users: sessions that have it.
        is_abandoned: it was blocked, and ends once what blocks it returns.
    """

    def __init__(self) -> None:
        self.users = 0
        self.is_abandoned = False
        self.loop = asyncio.new_event_loop()
        #: the session of each task
        self._callers = weakref.WeakKeyDictionary[asyncio.Task[Any], SessionExecutor | None]()
        self.loop.set_task_factory(self._task)
        try:
            threading.Thread(target=self._run, name="tools", daemon=True).start()
        except BaseException:
            self.loop.close()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
        task = asyncio.Task(work, loop=loop, **options)
        self._callers[task] = _caller.get()
        return task

    def submit(self, make: Callable[[], Any]) -> Any:
        """A future of (result, None) or (None, error): an exit that user code raises must not end the loop."""

        async def run() -> tuple[Any, Exception | None]:
            try:
                result = make()
                return (await result if inspect.isawaitable(result) else result), None
            except asyncio.CancelledError as error:
                if was_cancelled():
                    raise
                return None, RuntimeError(f"the code cancelled itself: {error!r}")
            except Exception as error:
                return None, error
            except BaseException as error:
                return None, RuntimeError(f"{type(error).__name__}: {error}")

        return asyncio.run_coroutine_threadsafe(run(), self.loop)

    async def responds(self) -> bool:
        """Whether it runs anything."""
        ran: Future[None] = Future()
        ran.set_running_or_notify_cancel()
        try:
            self.loop.call_soon_threadsafe(ran.set_result, None)
        except RuntimeError:  # a parallel call found it blocked and stopped it, and what blocked it has returned
            return False
        done, _ = await asyncio.wait([asyncio.wrap_future(ran)], timeout=_RESPONDS_S)
        return bool(done)

    def cancel(self, caller: SessionExecutor, done: Callable[[], None]) -> None:
        """End the tasks that a session's code has left, and then call `done`: at once, unless the thread is blocked."""

        def cancel() -> None:
            for task, owner in list(self._callers.items()):
                if owner is caller and not task.done():
                    task.cancel()
            done()

        self.loop.call_soon_threadsafe(cancel)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


class Loops:
    """The loops of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.loops: list[ExecutorLoop] = []

    def lease(self, code: str) -> ExecutorLoop:
        """A loop that no session has; a new one; or, where there are `MOST_LOOPS`, the one that the fewest have.

        Raises:
            UnscoredError: there is none, and none can be started.
        """
        with self._lock:
            least = min(self.loops, key=lambda loop: loop.users, default=None)
            if least is None or (least.users and len(self.loops) < MOST_LOOPS):
                try:
                    least = ExecutorLoop()
                    self.loops.append(least)
                except (OSError, RuntimeError) as failure:
                    if least is None:
                        raise UnscoredError(
                            Reason.INFRA, f"no thread to call {code} can be started: {failure}"
                        ) from failure
            least.users += 1
            return least

    def give_back(self, loop: ExecutorLoop, caller: SessionExecutor) -> None:
        """A session does not need its loop any more. It is free once nothing blocks it."""

        def done() -> None:
            with self._lock:
                loop.users -= 1

        with self._lock:
            if not loop.is_abandoned:
                loop.cancel(caller, done)

    def abandon(self, loop: ExecutorLoop) -> None:
        """A loop is blocked: no session gets it any more."""
        with self._lock:
            if loop in self.loops:
                self.loops.remove(loop)
                loop.is_abandoned = True
                loop.stop()  # once what blocks it returns


LOOPS = Loops()


class Calls:
    """Threads for functions that block, which are used again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._threads = self._busy = 0

    def submit(self, call: "_Call") -> None:
        """Have a function called, as soon as a thread is free.

        Raises:
            RuntimeError: there is no thread, and none can be started.
        """
        with self._lock:
            self._busy += 1
            try:
                self._grow()
            except RuntimeError:
                if not self._threads:
                    self._busy -= 1
                    raise
        self._work.put(call)

    def _grow(self) -> None:
        """Start a thread where there are more calls than threads. The lock is held."""
        if self._busy > self._threads and self._threads < MOST_CALLS:
            threading.Thread(target=self._run, name="tool", daemon=True).start()
            self._threads += 1

    def abandon(self, call: "_Call") -> None:
        """Nobody waits for a call any more: its thread does not count until it returns."""
        with self._lock:
            if call.is_abandoned or call.future.done():
                return
            call.is_abandoned = True
            if call.has_begun:
                self._threads -= 1
                self._busy -= 1
                with contextlib.suppress(RuntimeError):  # the calls that wait get the thread of another call
                    self._grow()

    def _run(self) -> None:
        while True:
            call = self._work.get()
            with self._lock:
                call.has_begun = True
                skipped = call.is_abandoned
            if not skipped:
                call.run()
            with self._lock:
                if call.is_abandoned and not skipped:
                    return  # others have taken its place
                self._busy -= 1


def was_cancelled() -> bool:
    """Whether someone cancelled the running task, and its code did not do so itself."""
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())


class _Call:
    """A function that is called in a thread, with the context of its caller."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # the thread ends with it, whether or not someone still waits
        self.has_begun = self.is_abandoned = False
        self._function, self._context = function, contextvars.copy_context()
        self._clock = self._context.run(clock.current)
        if self._clock is not None:
            self._clock.stop()  # until a thread is free

    def run(self) -> None:
        """Call it."""
        if self._clock is not None:
            self._clock.go_on()
        try:
            self.future.set_result(self._context.run(self._function))
        except StopIteration as error:  # asyncio's futures cannot hold one
            self.future.set_exception(RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:
            self.future.set_exception(error)


CALLS = Calls()


async def in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a thread that does not keep the process from ending.

    A process has up to `MOST_CALLS` such threads. A call that waits for one does not run out of time meanwhile. Where
    it is cancelled while it runs, its thread is left behind and does not count.

    Raises:
        UnscoredError: no thread can be started.
    """
    call = _Call(function)
    try:
        CALLS.submit(call)
    except RuntimeError as error:
        raise UnscoredError(Reason.INFRA, f"no thread for a tool can be started: {error}") from error
    try:
        return await asyncio.wrap_future(call.future)
    except asyncio.CancelledError:
        CALLS.abandon(call)
        raise
