"""What judging a sample gives: a reward, or the reason why there is none. A missing reward is never a number.

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

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value


class NoVerdictError(Exception):
    """Ends a session or a call that cannot be judged; loops, environments and what they call may raise it.

    Args:
        reason: a `Reason`, or its value.
        detail: what happened, for people.
    """

    def __init__(self, reason: Reason | str, detail: str = "") -> None:
        self.verdict = NoVerdict(Reason(reason), detail)
        super().__init__(str(self.verdict))

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuilt without `__init__`, whose arguments are not `args`."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


def no_verdict_of(error: BaseException) -> NoVerdict:
    """What an exception that ended a session means: its own verdict, `timeout` for a `TimeoutError`, else `infra`."""
    if isinstance(error, NoVerdictError):
        return error.verdict
    reason = Reason.TIMEOUT if isinstance(error, TimeoutError) else Reason.INFRA
    return NoVerdict(reason, f"{type(error).__name__}: {error}")
