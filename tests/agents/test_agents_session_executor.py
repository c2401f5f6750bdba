"""The threads that sessions' code runs in: used again, shared where there are many, left where they are blocked."""

import asyncio
import threading
import time
from typing import Any

from hybridrl.agents import session_executor
from hybridrl.agents.session_executor import CallTimeoutError, ExecutorLoop, SessionExecutor, in_thread


def test_a_loop_that_was_stopped_does_not_respond() -> None:
    """Two parallel calls may find the same loop blocked: the first stops it."""

    async def after_the_end() -> bool:
        loop = ExecutorLoop()
        loop.stop()
        while not loop.loop.is_closed():
            await asyncio.sleep(0.01)
        return await loop.responds()

    assert not asyncio.run(after_the_end())


def test_threads_are_used_again_by_later_sessions(monkeypatch) -> None:
    monkeypatch.setattr(session_executor, "LOOPS", session_executor.Loops())
    monkeypatch.setattr(session_executor, "CALLS", session_executor.Calls())

    async def session() -> tuple[int, int]:
        own = SessionExecutor("the tool")
        loop = await own.run(threading.get_ident, 5)
        assert loop == await own.run(threading.get_ident, 5)  # what it keeps may be bound to its thread
        call = await own.run(lambda: in_thread(threading.get_ident), 5)
        own.stop()
        while session_executor.LOOPS.loops[0].users:
            await asyncio.sleep(0.001)
        return loop, call

    async def sessions() -> list[tuple[int, int]]:
        return [await session() for _ in range(5)]

    assert len(set(asyncio.run(sessions()))) == 1


def test_sessions_beyond_the_most_threads_share_them(monkeypatch) -> None:
    """No call runs out of time while it waits for a thread; one that hangs does, and the others get another thread."""
    monkeypatch.setattr(session_executor, "LOOPS", session_executor.Loops())
    monkeypatch.setattr(session_executor, "MOST_LOOPS", 2)
    released, threads = threading.Event(), set()

    def waits() -> str:
        threads.add(threading.get_ident())
        time.sleep(0.2)
        return "done"

    async def session(function, limit: float) -> Any:
        own = SessionExecutor("the tool")
        try:
            return await own.run(function, limit)
        except CallTimeoutError as error:
            return error
        finally:
            own.stop()

    async def sessions() -> list[Any]:
        fine = await asyncio.gather(*(session(waits, 1.5) for _ in range(20)))  # ten times 0.2 s in each thread
        assert fine == ["done"] * 20 and len(threads) == 2
        hanging = [asyncio.ensure_future(session(released.wait, 0.3)) for _ in range(2)]
        await asyncio.sleep(0.05)
        return await asyncio.gather(*hanging, *(session(lambda: "works", 0.3) for _ in range(6)))

    try:
        found = asyncio.run(sessions())
    finally:
        released.set()
    assert [type(one) for one in found[:2]] == [CallTimeoutError] * 2 and found[2:] == ["works"] * 6


def test_a_thread_that_a_session_blocked_before_it_ended_is_abandoned_by_those_who_wait_for_it(monkeypatch) -> None:
    monkeypatch.setattr(session_executor, "LOOPS", session_executor.Loops())
    monkeypatch.setattr(session_executor, "MOST_LOOPS", 1)
    released = threading.Event()

    async def sessions() -> Any:
        gone, next_one = SessionExecutor("the tool"), SessionExecutor("the tool")
        blocks = asyncio.ensure_future(gone.run(released.wait, 60))
        await asyncio.sleep(0.1)
        gone.stop()  # its session ended while the call still ran
        try:
            return await asyncio.wait_for(next_one.run(lambda: "works", 0.3), 30)
        finally:
            blocks.cancel()

    try:
        assert asyncio.run(sessions()) == "works"
    finally:
        released.set()


def test_calls_beyond_the_most_threads_wait_and_hanging_ones_do_not_count(monkeypatch) -> None:
    monkeypatch.setattr(session_executor, "CALLS", session_executor.Calls())
    monkeypatch.setattr(session_executor, "MOST_CALLS", 2)
    released, running, most = threading.Event(), [0], [0]

    def waits() -> str:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.2)
        running[0] -= 1
        return "done"

    async def session(function, limit: float) -> Any:
        own = SessionExecutor("the tool")
        try:
            return await own.run(lambda: in_thread(function), limit)
        except CallTimeoutError as error:
            return error
        finally:
            own.stop()

    async def sessions() -> None:
        assert await asyncio.gather(*(session(waits, 1.5) for _ in range(20))) == ["done"] * 20
        assert most[0] == 2
        hung = await asyncio.gather(*(session(released.wait, 0.2) for _ in range(4)))
        assert [type(one) for one in hung] == [CallTimeoutError] * 4
        assert await asyncio.gather(*(session(waits, 1.5) for _ in range(4))) == ["done"] * 4

    try:
        asyncio.run(sessions())
    finally:
        released.set()


def test_what_a_session_left_running_ends_with_it(monkeypatch) -> None:
    monkeypatch.setattr(session_executor, "LOOPS", session_executor.Loops())
    ended = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    kept = []

    async def leaves() -> None:
        kept.append(asyncio.create_task(forever()))
        await asyncio.sleep(0)

    async def session() -> None:
        own = SessionExecutor("the tool")
        await own.run(leaves, 5)
        assert not ended.is_set()
        own.stop()

    asyncio.run(session())
    assert ended.wait(10)
