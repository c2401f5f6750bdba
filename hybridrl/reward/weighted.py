"""Several reward functions, each with its own processes; a sample's score is the weighted sum of theirs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from hybridrl.reward.judge_pool import JudgePool
from hybridrl.reward.limited import LimitedPool
from hybridrl.reward.no_function import NoFunction
from hybridrl.reward.processes.outcome import Outcome, ScoreError, without_score
from hybridrl.reward.processes.pool import RewardPool
from hybridrl.reward.signature import RewardCall, Sample
from hybridrl.scored import Reason, Unscored


class WeightedPools:
    """Scores samples with several functions; it is used like a `RewardPool`.

    With parts p, weights w_p and scores s_p, a sample's score is the sum of w_p * s_p over the parts that apply to it.
    Its extra information holds that as `score`, each part's own score under the part's name (None where it does not
    apply), and what a part's dict holds besides as `PART/KEY`.

    Args:
        pools: a pool per part, by name.
        weights: a factor per part.
        tolerates: see `RewardPool`.
    """

    def __init__(
        self,
        pools: Mapping[str, RewardPool | JudgePool],
        weights: Mapping[str, float],
        tolerates: Collection[Reason] = (),
    ) -> None:
        self.pools = dict(pools)
        self.weights = dict(weights)
        self.tolerates = tolerates

    @property
    def label(self) -> str:
        """How messages refer to the functions."""
        return " + ".join(f"{self.weights[name]:g} * {name}" for name in self.pools)

    @property
    def built_in(self) -> bool:
        """Whether the built-in scorers score, alone or as a part."""
        return any(pool.built_in for pool in self.pools.values())

    @property
    def calls(self) -> list[tuple[str, RewardCall]]:
        """Each function's label, and how it is called; waits until all have been loaded."""
        return [call for pool in self.pools.values() for call in pool.calls]

    def start(self, wait_for_one: bool = False) -> None:
        """Start the processes of every function; see `RewardPool.start`."""
        for pool in self.pools.values():
            pool.start()
        for pool in self.pools.values() if wait_for_one else ():
            pool.start(wait_for_one=True)

    def submit(self, sample: Sample, name: str = "a sample") -> Future[Outcome]:
        """Score one sample as soon as processes are free; see `RewardPool.submit`."""
        return self.submit_all([sample], lambda _: name)[0]

    def submit_all(
        self, samples: Sequence[Sample], describe: Callable[[int], str] = "sample {}".format
    ) -> list[Future[Outcome]]:
        """Score samples; see `RewardPool.submit_all`."""
        found = {part: pool.submit_all(samples, describe) for part, pool in self.pools.items()}
        return [
            self._future_sum({part: futures[number] for part, futures in found.items()}, describe(number))
            for number in range(len(samples))
        ]

    def _future_sum(self, futures: Mapping[str, Future[Outcome]], name: str) -> Future[Outcome]:
        result: Future[Outcome] = Future()
        waiting, lock = set(futures), threading.Lock()

        def done(part: str) -> None:
            with lock:  # each part's thread comes here
                waiting.discard(part)
                if waiting:
                    return
            try:
                found = {part: future.result() for part, future in futures.items()}
                result.set_result(self._sum(found, name))
            except BaseException as error:
                result.set_exception(error)

        result.set_running_or_notify_cancel()
        for part, future in list(futures.items()):
            future.add_done_callback(lambda _, part=part: done(part))  # type: ignore[misc]
        return result

    def run(self, samples: Sequence[Sample], describe: Callable[[int], str] = "sample {}".format) -> list[Outcome]:
        """Score samples; see `RewardPool.run`. The functions run at the same time.

        Raises:
            RewardError: a function failed, unless the pools tolerate it.
        """
        found: dict[str, Future[list[Outcome]]] = {}
        for name, pool in self.pools.items():
            found[name] = _in_thread(pool.run, samples, describe)
        outcomes = {name: future.result() for name, future in found.items()}
        return [
            self._sum({name: of_part[number] for name, of_part in outcomes.items()}, describe(number))
            for number in range(len(samples))
        ]

    def close(self) -> None:
        """End all processes."""
        for pool in self.pools.values():
            pool.close()

    def __enter__(self) -> WeightedPools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sum(self, parts: Mapping[str, Outcome], name: str) -> Outcome:
        seconds, timed_out = max(one.seconds for one in parts.values()), any(one.timed_out for one in parts.values())
        error = next((one.error for one in parts.values() if one.error is not None), None)
        missing = next((one.unscored for one in parts.values() if one.unscored is not None), None)
        if missing is None and not any(one.applies for one in parts.values()):
            error = f"none of the reward functions {', '.join(parts)} applies to {name}: each returned None"
            if Reason.GRADING not in self.tolerates:
                raise ScoreError(error)
            missing = Unscored(Reason.GRADING, error)
        if missing is not None:  # a sum without one of its parts would be another reward
            return without_score(missing, seconds, timed_out=timed_out, error=error)
        score = math.fsum(self.weights[part] * one.score for part, one in parts.items() if one.applies)
        extra: dict[str, Any] = {"score": score}
        for part, one in parts.items():
            extra[part] = one.score if one.applies else None
            extra |= {f"{part}/{key}": value for key, value in (one.extra or {}).items() if key != "score"}
        return Outcome(score, extra, seconds)


def _in_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Return the future result of a call in a thread of its own."""
    result: Future[Any] = Future()

    def call() -> None:
        try:
            result.set_result(function(*args))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=call, name="reward-part", daemon=True).start()
    return result


#: what a reward manager scores with
Pool = RewardPool | WeightedPools | LimitedPool | NoFunction
