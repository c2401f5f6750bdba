"""Runs foreign code of a session (tools, environments, simulated users): within time limits, apart from all others."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hybridrl.utils import clock
from hybridrl.verdict import NoVerdictError, Reason

_POLL_S = 0.05
_RESPONDS_S = 1.0  # an event loop that runs nothing for so long is blocked


class CallTimeoutError(TimeoutError):
    """Foreign code did not answer in time."""


class Side:
    """An event loop for the calls of one session, in a thread of its own.

    Code that blocks or hangs delays no other session. What hangs in Python cannot be ended: its thread is left behind,
    and the next call gets a new one.

    Args:
        what: who is called, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._loop: _SideLoop | None = None

    async def run(self, make: Callable[[], Any], limit_s: float) -> Any:
        """The result of `make()`, which is awaited if it can be. `make` runs in the side loop, and may block.

        Raises:
            CallTimeoutError: it took longer than the limit, without the time in `clock.stopped()`.
            NoVerdictError: this process cannot have one more thread, or open one more file.
        """
        if self._loop is None:
            try:
                self._loop = _SideLoop()
            except (OSError, RuntimeError) as failure:
                raise NoVerdictError(
                    Reason.INFRA, f"no thread to call {self._what} can be started: {failure}"
                ) from failure
        side = self._loop
        with clock.running(clock.Clock()) as measured:
            future = asyncio.wrap_future(side.submit(make))
        while not (await asyncio.wait([future], timeout=max(limit_s - measured.seconds, _POLL_S)))[0]:
            if measured.is_stopped or measured.seconds < limit_s:
                continue
            future.cancel()
            if not await side.responds() and self._loop is side:
                side.stop()  # once what blocks it returns
                self._loop = None
            raise CallTimeoutError(f"{self._what} did not answer within {limit_s:g} s")
        result, error = future.result()
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        """End the thread, or leave it behind where it is blocked."""
        if self._loop is not None:
            self._loop.stop()
            self._loop = None


class _SideLoop:
    """An event loop in a thread of its own, which does not keep the process from ending."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        try:
            threading.Thread(target=self._run, name="tools", daemon=True).start()
        except BaseException:
            self._loop.close()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def submit(self, make: Callable[[], Any]) -> Any:
        """A future of (result, None) or (None, error): an exit that foreign code raises must not end the loop."""

        async def run() -> tuple[Any, Exception | None]:
            try:
                result = make()
                return (await result if inspect.isawaitable(result) else result), None
            except asyncio.CancelledError:
                raise
            except Exception as error:
                return None, error
            except BaseException as error:
                return None, RuntimeError(f"{type(error).__name__}: {error}")

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    async def responds(self) -> bool:
        """Whether it runs anything."""
        ran: Future[None] = Future()
        ran.set_running_or_notify_cancel()
        try:
            self._loop.call_soon_threadsafe(ran.set_result, None)
        except RuntimeError:  # a parallel call found it blocked and stopped it, and what blocked it has returned
            return False
        done, _ = await asyncio.wait([asyncio.wrap_future(ran)], timeout=_RESPONDS_S)
        return bool(done)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
