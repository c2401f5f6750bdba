"""A limit on how fast samples are given to a pool: requests and tokens per minute, and requests at once."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from hybridrl.errors import RewardError
from hybridrl.reward.processes.outcome import Outcome
from hybridrl.reward.signature import RewardCall, Sample

if TYPE_CHECKING:
    from hybridrl.reward.processes.pool import RewardPool
    from hybridrl.reward.weighted import WeightedPools

_WINDOW_S = 60.0


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


class LimitedPool:
    """A pool whose samples wait for their turn; it is used like a `RewardPool`.

    Args:
        pool: scores the samples.
        rate: how many may begin.
        max_concurrent: samples that are being scored at once.
        tokens: of the request for a sample.
    """

    def __init__(
        self,
        pool: RewardPool | WeightedPools,
        rate: Rate,
        max_concurrent: int,
        tokens: Callable[[Sample], float] = lambda sample: 1.0,
    ) -> None:
        self.pool = pool
        self._rate, self._most, self._tokens = rate, max_concurrent, tokens
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Sample, str, Future[Outcome]]] = deque()
        self._running = 0
        self._thread: threading.Thread | None = None

    @property
    def label(self) -> str:
        """How messages refer to the functions."""
        return self.pool.label

    @property
    def built_in(self) -> bool:
        """Whether the built-in scorers score, alone or as a part."""
        return self.pool.built_in

    @property
    def calls(self) -> list[tuple[str, RewardCall]]:
        """Each function's label, and how it is called; waits until all have been loaded.

        Raises:
            RewardError: one takes whole batches, whose requests cannot be counted.
        """
        found = self.pool.calls
        for label, how in found:
            if how.form == "batch":
                raise RewardError(
                    f"{label} takes a whole batch, and reward.reward_manager.name=rate_limited limits how many samples "
                    "begin: give it the parameters of a function of one sample"
                )
        return found

    def start(self, wait_for_one: bool = False) -> None:
        """Start the processes; see `RewardPool.start`."""
        self.pool.start(wait_for_one)
        if wait_for_one:
            _ = self.calls

    def submit(self, sample: Sample, name: str = "a sample") -> Future[Outcome]:
        """Score one sample when its turn has come; see `RewardPool.submit`."""
        return self.submit_all([sample], lambda _: name)[0]

    def submit_all(
        self, samples: Sequence[Sample], describe: Callable[[int], str] = "sample {}".format
    ) -> list[Future[Outcome]]:
        """Score samples, each when its turn has come; see `RewardPool.submit_all`."""
        futures: list[Future[Outcome]] = [Future() for _ in samples]
        names = map(describe, range(len(samples)))
        with self._changed:
            self._waiting.extend(zip(samples, names, futures, strict=False))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="reward-rate", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return futures

    def run(self, samples: Sequence[Sample], describe: Callable[[int], str] = "sample {}".format) -> list[Outcome]:
        """Score samples; see `RewardPool.run`. After a failure those that have not begun are given up."""
        _ = self.calls
        futures = self.submit_all(samples, describe)
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """End all processes; samples that wait fail."""
        with self._changed:
            waiting, self._waiting = self._waiting, deque()
            self._thread = None
            self._changed.notify_all()
        for _, _, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(RewardError("the reward pool was closed"))
        self.pool.close()

    def __enter__(self) -> LimitedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        """Hand over samples, in their order, each as soon as the limits allow."""
        while True:
            with self._changed:
                while self._thread is threading.current_thread():
                    while self._waiting and self._waiting[0][2].cancelled():
                        self._waiting.popleft()
                    if not self._waiting or self._running >= self._most:
                        self._changed.wait()
                    elif wait_s := self._rate.wait_s(self._tokens(self._waiting[0][0])):
                        self._changed.wait(wait_s)
                    else:
                        break
                else:
                    return
                sample, name, future = self._waiting.popleft()
                self._running += 1
            if not future.set_running_or_notify_cancel():
                self._ended()
                continue
            self.pool.submit(sample, name).add_done_callback(lambda done, future=future: self._done(done, future))  # type: ignore[misc]

    def _done(self, done: Future[Outcome], future: Future[Outcome]) -> None:
        self._ended()
        error = done.exception()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())

    def _ended(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()
