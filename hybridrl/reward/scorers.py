"""Scorers, with which reward managers score: one coroutine per sample, around another one or around a process.

A `SampleScorer` defines `score(sample)`; the calls that block, and those that return futures, are the same for all of
them. `RewardPool` runs a function in processes. The scorers here ask others: several functions and their weighted sum,
a function with a limit on its rate, a judge that the run serves, or none at all.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self, TypeVar

from hybridrl.errors import RewardError
from hybridrl.reward.judge import ANSWER, ANSWER_IS_CUT, QUESTION, JudgeAnswer
from hybridrl.reward.processes.outcome import Outcome, ScoreError, without_score
from hybridrl.reward.signature import RewardCall, Sample
from hybridrl.scored import Reason, Unscored, UnscoredError
from hybridrl.utils.background import BackgroundLoop

#: answers a conversation, or raises `UnscoredError`
Answering = Callable[[list[dict[str, str]]], Awaitable[JudgeAnswer]]
Calls = Sequence[tuple[str, RewardCall]]
T = TypeVar("T")

_WINDOW_S = 60.0


class SampleScorer(ABC):
    """Scores samples. Methods that are no coroutines may be called from any thread.

    Attributes:
        parts: the scorers that it asks.
    """

    parts: Sequence[SampleScorer] = ()

    def __init__(self) -> None:
        self._loop: BackgroundLoop | None = None
        self._loop_lock = threading.Lock()

    # ------------------------------------------------------------------ what each scorer defines

    @abstractmethod
    async def score(self, sample: Sample, name: str = "a sample") -> Outcome:
        """Score one sample; `name` is how messages refer to it.

        Raises:
            ScoreError: the function raises, returns no finite number or ends its process, unless that is tolerated.
            RewardError: it cannot be loaded, takes a whole batch, or hangs on the very first samples.
        """

    async def score_batch(self, samples: Sequence[Sample], describe: Callable[[int], str]) -> list[Outcome]:
        """Score samples, each by `score`; after a failure the others are given up.

        Args:
            samples: what to score.
            describe: names the i-th sample in messages.
        """
        return await all_of(self.score(sample, describe(number)) for number, sample in enumerate(samples))

    async def loaded(self) -> Calls:
        """Return each function's label, and how it is called, once all have been loaded.

        Raises:
            RewardError: one cannot be loaded.
        """
        return list(itertools.chain.from_iterable(await all_of(part.loaded() for part in self.parts)))

    @property
    @abstractmethod
    def label(self) -> str:
        """The name that messages use."""

    @property
    def built_in(self) -> bool:
        """Whether the built-in scorers score, alone or as a part."""
        return any(part.built_in for part in self.parts)

    def begin(self) -> None:
        """Start the processes, without waiting for them."""
        for part in self.parts:
            part.begin()

    # ------------------------------------------------------------------ the same for all

    @property
    def calls(self) -> Calls:
        """Each function's label, and how it is called; waits until all have been loaded."""
        return self._wait_for(self.loaded())

    def start(self, wait_for_one: bool = False) -> None:
        """Start the processes; with `wait_for_one` return when the functions have been loaded.

        Raises:
            RewardError: one cannot be loaded (only with `wait_for_one`; otherwise the first sample says so).
        """
        self.begin()
        if wait_for_one:
            _ = self.calls

    def submit(self, sample: Sample, name: str = "a sample") -> Future[Outcome]:
        """Score one sample; the future raises what `score` raises, and is cancelled to give the sample up."""
        return self._submitted(self.score(sample, name))

    def submit_all(
        self, samples: Sequence[Sample], describe: Callable[[int], str] = "sample {}".format
    ) -> list[Future[Outcome]]:
        """Score samples, as `submit` scores one; `describe` names the i-th."""
        return [self.submit(sample, describe(number)) for number, sample in enumerate(samples)]

    def run(self, samples: Sequence[Sample], describe: Callable[[int], str] = "sample {}".format) -> list[Outcome]:
        """Score samples; the i-th outcome belongs to the i-th sample. A function that takes a batch is called once.

        Raises:
            RewardError: see `score`; the other samples are given up.
        """
        return self._wait_for(self.score_batch(samples, describe)) if samples else []

    def close(self) -> None:
        """End all processes; samples that are not scored yet fail. A later call starts new ones."""
        with self._loop_lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
        for part in self.parts:
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submitted(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._loop_lock:
            if self._loop is None:
                self._loop = BackgroundLoop("reward")
            return self._loop.submit(_until_closed(self._loop, work))

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submitted(work)
        try:
            return future.result()
        finally:
            future.cancel()  # where Ctrl-C interrupts the wait


async def _until_closed(loop: BackgroundLoop, work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except asyncio.CancelledError:
        if loop.is_closing:
            if (task := asyncio.current_task()) is not None:  # nobody may wait for it any more
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise RewardError("the reward pool was closed") from None
        raise


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of coroutines that run at the same time; where one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class NoFunction(SampleScorer):
    """Scores every sample 0, for runs in which a reward model alone or the sessions themselves score.

    Managers may add to that score.
    """

    label = "no reward function"

    async def score(self, sample: Sample, name: str = "a sample") -> Outcome:
        return Outcome(0.0, {}, 0.0)


class WeightedSum(SampleScorer):
    """Scores samples with several functions, each with its own processes.

    With parts p, weights w_p and scores s_p, a sample's score is the sum of w_p * s_p over the parts that apply to it.
    Its extra information holds that as `score`, each part's own score under the part's name (None where it does not
    apply), and what a part's dict holds besides as `PART/KEY`.

    Args:
        scorers: one per part, by name.
        weights: a factor per part.
        tolerates: see `RewardPool`.
    """

    def __init__(
        self, scorers: Mapping[str, SampleScorer], weights: Mapping[str, float], tolerates: Collection[Reason] = ()
    ) -> None:
        super().__init__()
        self.scorers = dict(scorers)
        self.parts = list(scorers.values())
        self.weights = dict(weights)
        self.tolerates = tolerates

    @property
    def label(self) -> str:
        return " + ".join(f"{self.weights[name]:g} * {name}" for name in self.scorers)

    async def score(self, sample: Sample, name: str = "a sample") -> Outcome:
        outcomes = await all_of(scorer.score(sample, name) for scorer in self.parts)
        return self._sum(dict(zip(self.scorers, outcomes, strict=True)), name)

    async def score_batch(self, samples: Sequence[Sample], describe: Callable[[int], str]) -> list[Outcome]:
        """Score samples; the functions run at the same time, and one that takes a batch is called once."""
        columns = await all_of(scorer.score_batch(samples, describe) for scorer in self.parts)
        return [
            self._sum(dict(zip(self.scorers, row, strict=True)), describe(number))
            for number, row in enumerate(zip(*columns, strict=True))
        ]

    def _sum(self, parts: Mapping[str, Outcome], name: str) -> Outcome:
        outcomes = parts.values()
        seconds, timed_out = max(part.seconds for part in outcomes), any(part.timed_out for part in outcomes)
        error = next((part.error for part in outcomes if part.error is not None), None)
        missing = next((part.unscored for part in outcomes if part.unscored is not None), None)
        if missing is None and not any(part.applies for part in outcomes):
            error = f"none of the reward functions {', '.join(parts)} applies to {name}: each returned None"
            if Reason.GRADING not in self.tolerates:
                raise ScoreError(error)
            missing = Unscored(Reason.GRADING, error)
        if missing is not None:  # a sum without one of its parts would be another reward
            return without_score(missing, seconds, timed_out=timed_out, error=error)
        score = math.fsum(self.weights[name] * part.score for name, part in parts.items() if part.applies)
        extra: dict[str, Any] = {"score": score}
        for name, part in parts.items():
            extra[name] = part.score if part.applies else None
            extra |= {f"{name}/{key}": value for key, value in (part.extra or {}).items() if key != "score"}
        return Outcome(score, extra, seconds)


class Rate:
    """At most so many requests and tokens begin within any 60 seconds.

    Args:
        requests, tokens: per minute; None: any number.
        now: the time in seconds.
    """

    def __init__(self, requests: float | None, tokens: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._requests, self._tokens, self._now = requests, tokens, now
        self._begun: deque[tuple[float, float]] = deque()
        self._used = 0.0

    def wait_s(self, tokens: float) -> float:
        """Seconds until a request of so many tokens may begin; 0: it may begin now, and counts as begun."""
        now = self._now()
        while self._begun and self._begun[0][0] <= now - _WINDOW_S:
            self._used -= self._begun.popleft()[1]
        full = self._requests is not None and len(self._begun) + 1 > self._requests
        over = 0.0 if self._tokens is None else self._used + tokens - self._tokens
        if self._begun and (full or over > 0):
            if full:
                return max(self._begun[0][0] + _WINDOW_S - now, 1e-3)
            freed = itertools.accumulate(used for _, used in self._begun)
            enough = next((number for number, sum_ in enumerate(freed) if sum_ >= over), len(self._begun) - 1)
            return max(self._begun[enough][0] + _WINDOW_S - now, 1e-3)
        self._begun.append((now, tokens))
        self._used += tokens
        return 0.0


class RateLimited(SampleScorer):
    """Has samples wait for their turn, in their order, before another scorer scores them.

    Args:
        scorer: scores the samples.
        rate: how many may begin.
        max_concurrent: samples that are being scored at once.
        tokens: of the request for a sample.
    """

    def __init__(
        self,
        scorer: SampleScorer,
        rate: Rate,
        max_concurrent: int,
        tokens: Callable[[Sample], float] = lambda sample: 1.0,
    ) -> None:
        super().__init__()
        self.parts = [scorer]
        self._scorer, self._rate, self._most, self._tokens = scorer, rate, max_concurrent, tokens
        self._renew()

    def _renew(self) -> None:
        self._turn, self._slots = asyncio.Lock(), asyncio.Semaphore(self._most)

    @property
    def label(self) -> str:
        return self._scorer.label

    async def loaded(self) -> Calls:
        """See `SampleScorer.loaded`.

        Raises:
            RewardError: a function takes whole batches, whose requests cannot be counted.
        """
        calls = await self._scorer.loaded()
        for label, how in calls:
            if how.form == "batch":
                raise RewardError(
                    f"{label} takes a whole batch, and reward.reward_manager.name=rate_limited limits how many samples "
                    "begin: give it the parameters of a function of one sample"
                )
        return calls

    async def score(self, sample: Sample, name: str = "a sample") -> Outcome:
        async with self._turn:
            await self._slots.acquire()
            try:
                while wait_s := self._rate.wait_s(self._tokens(sample)):
                    await asyncio.sleep(wait_s)
            except BaseException:
                self._slots.release()
                raise
        try:
            return await self._scorer.score(sample, name)
        finally:
            self._slots.release()

    async def score_batch(self, samples: Sequence[Sample], describe: Callable[[int], str]) -> list[Outcome]:
        await self.loaded()
        return await super().score_batch(samples, describe)

    def close(self) -> None:
        super().close()
        self._renew()  # a lock belongs to the loop in which samples waited for it


class JudgeScorer(SampleScorer):
    """Scores samples by what a model of the run answers: a judge that the run serves itself.

    A process makes the question, by the template, and reads the answer, by the function that the user may have given;
    both under the time limit of `pool`. What answers in between is known once the models of the run are loaded
    (`connect`).

    Args:
        pool: runs `hybridrl.reward.judge.ask_or_read`.
    """

    label = "the judge (reward.reward_model.judge)"

    def __init__(self, pool: SampleScorer) -> None:
        super().__init__()
        self.parts = [pool]
        self._pool = pool
        self._answer: Answering | None = None

    def connect(self, answer: Answering) -> None:
        """Have this answer from now on."""
        self._answer = answer

    async def loaded(self) -> Calls:
        return [(self.label, how) for _, how in await self._pool.loaded()]

    def submit(self, sample: Sample, name: str = "a sample") -> Future[Outcome]:
        """Ask about a sample; see `SampleScorer.submit`.

        Raises:
            RewardError: no model answers yet.
        """
        self._answering(name)
        return super().submit(sample, name)

    async def score(self, sample: Sample, name: str = "a sample") -> Outcome:
        answer = self._answering(name)
        question = await self._pool.score(replace(sample, columns={}), name)
        if question.unscored is not None:
            return question
        assert question.extra is not None
        try:
            answered = await answer(question.extra[QUESTION])
        except UnscoredError as error:
            return without_score(error.unscored, question.seconds)
        columns = {ANSWER: answered.text, ANSWER_IS_CUT: answered.is_cut}
        outcome = await self._pool.score(replace(sample, columns=columns), name)
        return replace(outcome, seconds=question.seconds + answered.seconds + outcome.seconds)

    def _answering(self, name: str) -> Answering:
        if self._answer is None:
            raise RewardError(
                f"{self.label}: the run that serves it has not loaded its models yet, so it cannot be asked about "
                f"{name}"
            )
        return self._answer


def judges_in(scorer: Any) -> Iterator[JudgeScorer]:
    """Yield the judges that a scorer asks, alone or as a part."""
    if isinstance(scorer, JudgeScorer):
        yield scorer
    for part in getattr(scorer, "parts", ()):
        yield from judges_in(part)
