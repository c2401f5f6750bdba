"""Functions in threads of their own: results, errors, and what becomes of work that nobody waits for any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from hybridrl.utils.background import WorkCancelled, ended_by, in_daemon_thread


def cancelled(function: Callable[[], object], began: threading.Event) -> None:
    """Run a function in a thread, and cancel the waiting for it once it has begun."""

    async def run() -> None:
        task = asyncio.ensure_future(in_daemon_thread(function))
        await asyncio.to_thread(began.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_a_result_an_error_and_an_end_that_no_thread_may_pass_on() -> None:
    assert asyncio.run(in_daemon_thread(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_daemon_thread(divmod, 7, 0))
    with pytest.raises(RuntimeError, match="SystemExit"):
        asyncio.run(in_daemon_thread(lambda: (_ for _ in ()).throw(SystemExit(3)).send(None)))


def test_work_that_nobody_waits_for_ends_at_what_it_waits_for() -> None:
    """Its calls that end the waiting are made, also the one of a block within a block; nothing after them is done."""
    began, ended, done = threading.Event(), threading.Event(), threading.Event()
    ends, beyond = [], []

    def work() -> None:
        try:
            with ended_by(lambda: ends.append("outer")):
                with ended_by(lambda: (ends.append("inner"), ended.set())):
                    began.set()
                    ended.wait(60)
                beyond.append("outer block")
        except WorkCancelled:
            done.set()

    cancelled(work, began)
    assert done.wait(60) and sorted(ends) == ["inner", "outer"] and not beyond


def test_a_block_that_begins_too_late_ends_at_once() -> None:
    began, go, done = threading.Event(), threading.Event(), threading.Event()
    ends = []

    def work() -> None:
        began.set()
        go.wait(60)
        try:
            with ended_by(lambda: ends.append(1)):
                pass
        except WorkCancelled:
            done.set()

    cancelled(work, began)
    go.set()
    assert done.wait(60) and ends == [1]


def test_other_threads_and_what_has_ended_are_left_alone() -> None:
    ends: list[int] = []

    def work() -> int:
        with ended_by(lambda: ends.append(1)):
            pass
        return 3

    with ended_by(lambda: ends.append(2)):
        assert asyncio.run(in_daemon_thread(work)) == 3
    assert not ends
