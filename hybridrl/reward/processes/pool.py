"""Processes that run the reward function, each sample under a time limit.

The processes are separate programs (nothing of the trainer is imported or copied into them), load the function from its
file, and end when this process ends, however that happens.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from hybridrl.reward.function import RewardFunction
from hybridrl.reward.processes.dispatcher import Dispatcher
from hybridrl.reward.processes.outcome import Outcome
from hybridrl.reward.processes.reward_process import RewardJob
from hybridrl.reward.scorers import Calls, SampleScorer
from hybridrl.reward.signature import Sample
from hybridrl.scored import Reason
from hybridrl.utils.cores import available_cores


class RewardPool(SampleScorer):
    """A pool of processes for one reward function.

    Args:
        function: which one.
        num_workers: number of processes; None: one per core that this process may use, at most 8.
        timeout_s: seconds that one call may take: a sample's, or the whole batch's where the function takes a batch.
        tolerates: a sample that the function fails for with such a reason (`grading`: it raised or returned no score;
            `infra`: its process ended) gets an `Outcome` with `error`, in place of an exception.
    """

    def __init__(
        self,
        function: RewardFunction,
        num_workers: int | None = None,
        timeout_s: float = 30.0,
        tolerates: Collection[Reason] = (),
    ) -> None:
        super().__init__()
        self.function = function
        self.tolerates = tolerates
        self.num_workers = num_workers or min(8, available_cores())
        self.timeout_s = timeout_s
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._dispatcher: Dispatcher | None = None

    @property
    def label(self) -> str:
        return self.function.label

    @property
    def built_in(self) -> bool:
        return self.function.path is None

    def begin(self) -> None:
        self._running().keep_processes()

    async def loaded(self) -> Calls:
        ready = await asyncio.wrap_future(self._running().when_loaded())
        return [(ready.label, ready.how)]

    async def score(self, sample: Sample, name: str = "a sample") -> Outcome:
        """Score one sample as soon as a process is free.

        A function that hangs on the very first samples that it is given, twice in every process, is a `RewardError`;
        later timeouts have no score.
        """
        outcome: Outcome = await asyncio.wrap_future(self.submit(sample, name))
        return outcome

    def submit_all(
        self, samples: Sequence[Sample], describe: Callable[[int], str] = "sample {}".format
    ) -> list[Future[Outcome]]:
        jobs = [self._job(sample, describe(number)) for number, sample in enumerate(samples)]
        self._running().add(jobs)
        return [job.future for job in jobs]

    def submit(self, sample: Sample, name: str = "a sample") -> Future[Outcome]:
        return self.submit_all([sample], lambda _: name)[0]

    async def score_batch(self, samples: Sequence[Sample], describe: Callable[[int], str]) -> list[Outcome]:
        """Score samples. A function that takes a batch is called once; processes that nobody waits for are ended."""
        dispatcher = self._running()
        ready = await asyncio.wrap_future(dispatcher.when_loaded())
        if ready.how.form == "batch":
            jobs = [self._job(list(samples), f"a batch of {len(samples)} responses", len(samples))]
        else:
            jobs = [self._job(sample, describe(number)) for number, sample in enumerate(samples)]
        try:
            dispatcher.add(jobs)
            await asyncio.wrap_future(_end_of([job.future for job in jobs]))
        except BaseException:
            dispatcher.give_up(jobs)
            raise
        results: list[Any] = [job.future.result() for job in jobs]
        return results if jobs[0].count is None else results[0]

    def close(self) -> None:
        """End all processes; samples that are not scored yet fail. A later call starts new processes."""
        with self._lock:
            dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.stop()
        super().close()

    def _running(self) -> Dispatcher:
        with self._lock:
            if self._dispatcher is None or self._dispatcher.has_failed:
                self._dispatcher = Dispatcher(self.function, self.num_workers, self.timeout_s, self.tolerates)
                self._dispatcher.start()
            return self._dispatcher

    def _job(self, value: Any, name: str, count: int | None = None) -> RewardJob:
        return RewardJob(next(self._numbers), value, name, count)


def _end_of(futures: Sequence[Future[Any]]) -> Future[None]:
    """Return a future that is done when all of these are, or fails with the first of them that does.

    One event for a batch of many thousands of samples, where a task for each would take longer than the function.
    """
    end: Future[None] = Future()
    end.set_running_or_notify_cancel()
    lock, remaining = threading.Lock(), len(futures)

    def note(future: Future[Any]) -> None:
        nonlocal remaining
        error = CancelledError() if future.cancelled() else future.exception()
        with lock:
            remaining -= 1
            if end.done() or (error is None and remaining):
                return
            if error is None:
                end.set_result(None)
            else:
                end.set_exception(error)

    for future in futures:
        future.add_done_callback(note)
    return end
