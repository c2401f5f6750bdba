"""Processes that run the reward function, each sample under a time limit.

The processes are separate programs (nothing of the trainer is imported or copied into them), load the function from its
file, and end when this process ends, however that happens.
"""

import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

from hybridrl.reward.function import RewardFunction
from hybridrl.reward.processes.dispatcher import Dispatcher
from hybridrl.reward.processes.handle import RewardJob
from hybridrl.reward.processes.outcome import Outcome
from hybridrl.reward.signature import RewardCall, Sample
from hybridrl.scored import Reason
from hybridrl.utils.cores import available_cores


class RewardPool:
    """A pool of processes for one reward function. All methods may be called from several threads at once.

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
        self.function = function
        self.tolerates = tolerates
        self.num_workers = num_workers or min(8, available_cores())
        self.timeout_s = timeout_s
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._dispatcher: Dispatcher | None = None

    def start(self, wait_for_one: bool = False) -> None:
        """Start the processes that are missing; with `wait_for_one` return when the function has been loaded.

        Raises:
            RewardError: the function cannot be loaded (only with `wait_for_one`; otherwise the first sample says so).
        """
        dispatcher = self._running()
        dispatcher.keep_processes()
        if wait_for_one:
            dispatcher.wait_loaded()

    @property
    def calls(self) -> list[tuple[str, RewardCall]]:
        """The function's name and file, and how it is called; waits until it has been loaded."""
        ready = self._running().wait_loaded()
        return [(ready.label, ready.how)]

    @property
    def label(self) -> str:
        """How messages refer to the function."""
        return self.function.label

    @property
    def built_in(self) -> bool:
        """Whether the built-in scorers score."""
        return self.function.path is None

    def submit(self, sample: Sample, name: str = "a sample") -> Future[Outcome]:
        """Score one sample as soon as a process is free.

        Args:
            sample: what to score.
            name: how messages refer to it.

        Returns:
            A future that raises `ScoreError` where the function raises, returns no finite number or ends its process,
            unless the pool tolerates it; and `RewardError` where it cannot be loaded, takes a whole batch, or hangs on
            the very first samples that it is given, twice in every process. Later timeouts have no score.
        """
        return self.submit_all([sample], lambda _: name)[0]

    def submit_all(
        self, samples: Sequence[Sample], describe: Callable[[int], str] = "sample {}".format
    ) -> list[Future[Outcome]]:
        """Score samples, as `submit` scores one, and hand them to the processes together.

        Args:
            samples: what to score.
            describe: names the i-th sample in messages.
        """
        jobs = [self._job(sample, describe(number)) for number, sample in enumerate(samples)]
        self._running().add(jobs)
        return [job.future for job in jobs]

    def run(self, samples: Sequence[Sample], describe: Callable[[int], str] = "sample {}".format) -> list[Outcome]:
        """Score samples; the i-th outcome belongs to the i-th sample. A function that takes a batch is called once.

        Args:
            samples: what to score.
            describe: names the i-th sample in messages.

        Raises:
            RewardError: see `submit`; the other samples are given up.
        """
        if not samples:
            return []
        dispatcher = self._running()
        if dispatcher.wait_loaded().how.form == "batch":
            jobs = [self._job(list(samples), f"a batch of {len(samples)} responses", len(samples))]
        else:
            jobs = [self._job(sample, describe(number)) for number, sample in enumerate(samples)]
        futures = [job.future for job in jobs]
        try:
            dispatcher.add(jobs)
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
        except BaseException:
            dispatcher.give_up(jobs)
            raise
        results: list[Any] = [future.result() for future in futures]
        return results if jobs[0].count is None else results[0]

    def close(self) -> None:
        """End all processes; samples that are not scored yet fail. A later call starts new processes."""
        with self._lock:
            dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.stop()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> Dispatcher:
        with self._lock:
            if self._dispatcher is None or self._dispatcher.has_failed:
                self._dispatcher = Dispatcher(self.function, self.num_workers, self.timeout_s, self.tolerates)
                self._dispatcher.start()
            return self._dispatcher

    def _job(self, value: Any, name: str, count: int | None = None) -> RewardJob:
        return RewardJob(next(self._numbers), value, name, count)
