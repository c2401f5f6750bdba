"""What judging a sample gives: a reward, or the reason why there is none. A missing reward is never a number.

Light enough for the processes of reward functions: no torch, no numpy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Reason(StrEnum):
    """Why a sample has no reward."""

    INFRA = "infra"  # a sandbox, server or process failed
    TIMEOUT = "timeout"  # something took longer than its limit
    GRADING = "grading"  # the scorer raised, or could not judge the sample
    DROPPED = "dropped"  # a loop, environment or filter decided to leave the sample out


@dataclass(frozen=True)
class Verdict:
    """A judged sample.

    Attributes:
        reward: finite.
        extra: further values of the sample: numbers, text, lists and dicts.
    """

    reward: float
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NoVerdict:
    """A sample without a reward: it is generated again or leaves its group, and never counts as 0.

    Attributes:
        reason: a `Reason`, or its value.
        detail: what happened, for people.
    """

    reason: Reason
    detail: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", Reason(self.reason))
