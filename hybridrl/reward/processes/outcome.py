"""The outcome of scoring a sample."""

from dataclasses import dataclass
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.scored import Reason, Unscored


class ScoreError(RewardError):
    """The reward function failed for one sample: it raised, returned no score, or ended its process.

    Attributes:
        reason: `grading`, or `infra` where its process ended.
    """

    def __init__(self, message: str, reason: Reason = Reason.GRADING) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Outcome:
    """The score of one sample.

    Attributes:
        score: the number; NaN where there is no score, 0 where the function does not apply.
        extra: the whole dict, where the function returned one.
        seconds: how long it took.
        timed_out: it exceeded the time limit.
        applies: the function returned a score, not None for "does not apply".
        error: why the function failed; None if it did not. Only in a pool that tolerates failures.
        unscored: why there is no score; None if there is one.
        brought_along: the sample brought the score along; no function was asked.
    """

    score: float
    extra: dict[str, Any] | None
    seconds: float
    timed_out: bool = False
    applies: bool = True
    error: str | None = None
    unscored: Unscored | None = None
    brought_along: bool = False


def without_score(unscored: Unscored, seconds: float, *, timed_out: bool = False, error: str | None = None) -> Outcome:
    """The outcome of a sample that was not scored; see `Outcome`."""
    return Outcome(float("nan"), None, seconds, timed_out=timed_out, error=error, unscored=unscored)
