"""A judge that the run serves itself: used like a `RewardPool`, with a model in between that answers questions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.reward.judge import ANSWER, QUESTION
from hybridrl.reward.processes.outcome import Outcome, without_score
from hybridrl.reward.processes.pool import RewardPool
from hybridrl.reward.signature import RewardCall, Sample
from hybridrl.scored import UnscoredError

#: answers a conversation with a text and the seconds that this took, or raises `UnscoredError`
Answering = Callable[[list[dict[str, str]]], Awaitable[tuple[str, float]]]


class JudgePool:
    """Scores samples by what a model of the run answers.

    A process makes the question, by the template, and reads the answer, by the function that the user may have given;
    both under the time limit of `pool`. What answers in between is known once the models of the run are loaded
    (`connect`).

    Args:
        pool: runs `hybridrl.reward.judge.ask_or_read`.
    """

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._answer: Answering | None = None
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[Future[Outcome]] = set()

    def connect(self, answer: Answering) -> None:
        """Have this answer from now on."""
        self._answer = answer

    @property
    def label(self) -> str:
        """How messages refer to the judge."""
        return "the judge (reward.reward_model.judge)"

    @property
    def built_in(self) -> bool:
        """Whether the built-in scorers score: never."""
        return False

    @property
    def calls(self) -> list[tuple[str, RewardCall]]:
        """How its function is called; waits until it has been loaded."""
        return [(self.label, how) for _, how in self._pool.calls]

    def start(self, wait_for_one: bool = False) -> None:
        """Start the process; see `RewardPool.start`."""
        self._pool.start(wait_for_one)

    def submit(self, sample: Sample, name: str = "a sample") -> Future[Outcome]:
        """Ask about a sample; see `RewardPool.submit`.

        Raises:
            RewardError: no model answers yet.
        """
        if self._answer is None:
            raise RewardError(
                f"{self.label}: the run that serves it has not loaded its models yet, so it cannot be asked about "
                f"{name}"
            )
        future = asyncio.run_coroutine_threadsafe(self._judged(sample, name, self._answer), self._running())
        with self._lock:
            self._tasks.add(future)
        future.add_done_callback(self._forget)
        return future

    def submit_all(
        self, samples: Sequence[Sample], describe: Callable[[int], str] = "sample {}".format
    ) -> list[Future[Outcome]]:
        """Ask about samples; see `RewardPool.submit_all`."""
        return [self.submit(sample, describe(number)) for number, sample in enumerate(samples)]

    def run(self, samples: Sequence[Sample], describe: Callable[[int], str] = "sample {}".format) -> list[Outcome]:
        """Ask about samples; see `RewardPool.run`. After a failure those that are not judged yet are given up."""
        futures = self.submit_all(samples, describe)
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """End the process; samples that are not judged yet are given up."""
        with self._lock:
            loop, self._loop = self._loop, None
            waiting = list(self._tasks)
        for future in waiting:
            future.cancel()
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
        self._pool.close()

    def __enter__(self) -> JudgePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _judged(self, sample: Sample, name: str, answer: Answering) -> Outcome:
        asked = await asyncio.wrap_future(self._pool.submit(replace(sample, columns={}), name))
        if asked.unscored is not None:
            return asked
        assert asked.extra is not None
        try:
            text, seconds = await answer(asked.extra[QUESTION])
        except UnscoredError as error:
            return without_score(error.unscored, asked.seconds)
        found = await asyncio.wrap_future(self._pool.submit(replace(sample, columns={ANSWER: text}), name))
        return replace(found, seconds=asked.seconds + seconds + found.seconds)

    def _running(self) -> asyncio.AbstractEventLoop:
        """The loop in which samples wait for answers, in a thread of its own."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="judge", daemon=True).start()
            return self._loop

    def _forget(self, future: Future[Outcome]) -> None:
        with self._lock:
            self._tasks.discard(future)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        waiting = asyncio.all_tasks(loop)
        for task in waiting:
            task.cancel()
        if waiting:
            loop.run_until_complete(asyncio.wait(waiting))
    finally:
        loop.close()


def judges_in(pool: Any) -> Iterator[JudgePool]:
    """Yield the judges that a pool asks, alone or as a part."""
    if isinstance(pool, JudgePool):
        yield pool
    for part in (*getattr(pool, "pools", {}).values(), *([pool.pool] if hasattr(pool, "pool") else [])):
        yield from judges_in(part)
