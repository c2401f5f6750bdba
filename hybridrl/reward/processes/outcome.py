"""What the pool says of a sample."""

from dataclasses import dataclass
from typing import Any

from hybridrl.errors import RewardError


class ScoreError(RewardError):
    """The reward function failed for one sample: it raised, returned no score, or ended its process."""


@dataclass(frozen=True)
class Outcome:
    """The score of one sample.

    Attributes:
        score: the number; 0 after a timeout, a failure, and where the function does not apply.
        extra: the whole dict, where the function returned one.
        seconds: how long it took.
        timed_out: it exceeded the time limit.
        applies: the function returned a score, not None for "does not apply".
        error: why there is no score; None if there is one. Only in a pool that tolerates failures.
    """

    score: float
    extra: dict[str, Any] | None
    seconds: float
    timed_out: bool = False
    applies: bool = True
    error: str | None = None
