"""A sample is scored, or unscored with a reason. A missing reward is never a number.

Light enough for the processes of reward functions: no torch, no numpy.
"""

import copyreg
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

#: rewards are numbers of 32 bits in a batch, where differences and sums of larger ones would be infinite
LARGEST_REWARD = 1e30


class Reason(StrEnum):
    """Why a sample has no reward."""

    INFRA = "infra"  # a sandbox, server or process failed
    TIMEOUT = "timeout"  # something took longer than its limit
    GRADING = "grading"  # the scorer raised, or could not score the sample
    DROPPED = "dropped"  # a loop, environment or filter decided to leave the sample out


@dataclass(frozen=True)
class Scored:
    """The reward of a sample.

    Attributes:
        reward: finite.
        extra: further values of the sample: numbers, text, lists and dicts.
    """

    reward: float
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unscored:
    """The reason why a sample has no reward: it is generated again or leaves its group, and never counts as 0.

    Attributes:
        reason: a `Reason`, or its value.
        detail: what happened, for people.
    """

    reason: Reason
    detail: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", Reason(self.reason))

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value


class UnscoredError(Exception):
    """Ends a session or a call that cannot be scored; loops, environments and what they call may raise it.

    Args:
        reason: a `Reason`, or its value.
        detail: what happened, for people.
    """

    def __init__(self, reason: Reason | str, detail: str = "") -> None:
        self.unscored = Unscored(Reason(reason), detail)
        super().__init__(str(self.unscored))

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild without `__init__`, whose arguments are not `args`."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


def reward_number(value: Any, source: str) -> float:
    """Return the reward that a tool or a simulated user gave, as a number.

    Args:
        value: a number, a `Scored` or an `Unscored`.
        source: what gave it, for messages.

    Raises:
        UnscoredError: it is an `Unscored`; or something else, not finite, or beyond `LARGEST_REWARD` (`grading`).
    """
    if isinstance(value, Unscored):
        raise UnscoredError(value.reason, value.detail)
    try:
        number = float(value.reward if isinstance(value, Scored) else value)
    except Exception as error:
        problem = f"{source} is a {type(value).__name__}, and must be a number: {error}"
        raise UnscoredError(Reason.GRADING, problem) from error
    if not abs(number) <= LARGEST_REWARD:  # nor NaN
        raise UnscoredError(Reason.GRADING, f"{source} is {number}; {LARGEST_REWARD:.3g} is the largest reward")
    return number


def unscored_by(error: BaseException) -> Unscored:
    """Return the reason that an exception gives: its own, `timeout` for a `TimeoutError`, else `infra`."""
    if isinstance(error, UnscoredError):
        return error.unscored
    reason = Reason.TIMEOUT if isinstance(error, TimeoutError) else Reason.INFRA
    return Unscored(reason, f"{type(error).__name__}: {error}")
