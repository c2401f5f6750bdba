"""A pool without a reward function, for runs in which a reward model alone or the sessions themselves score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from hybridrl.reward.processes.outcome import Outcome
from hybridrl.reward.signature import RewardCall, Sample


class NoFunction:
    """Scores every sample 0 without a process; it is used like a `RewardPool`. Managers may add to that score."""

    label = "no reward function"
    built_in = False
    calls: Sequence[tuple[str, RewardCall]] = ()

    def start(self, wait_for_one: bool = False) -> None:
        """Do nothing."""

    def submit(self, sample: Sample, name: str = "a sample") -> Future[Outcome]:
        """Return the outcome 0."""
        result: Future[Outcome] = Future()
        result.set_result(Outcome(0.0, {}, 0.0))
        return result

    def submit_all(
        self, samples: Sequence[Sample], describe: Callable[[int], str] = "sample {}".format
    ) -> list[Future[Outcome]]:
        """Return the outcome 0 for each sample."""
        return [self.submit(sample) for sample in samples]

    def run(self, samples: Sequence[Sample], describe: Callable[[int], str] = "sample {}".format) -> list[Outcome]:
        """Return the outcome 0 for each sample."""
        return [Outcome(0.0, {}, 0.0) for _ in samples]

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> NoFunction:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""
