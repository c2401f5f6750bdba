"""Results that less trusted processes send to the run, as JSON of a fixed form that is checked on arrival.

A reward function, an agent, or a program of the model's that one of them runs can take over its process. What such a
process sends is data: nothing of it is executed, whatever it holds.

Imported by these processes, so it must stay light: no torch, no numpy.
"""

import json
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hybridrl.processes.frames import MalformedMessage
from hybridrl.scored import Reason

LARGEST_RESULT = 1 << 26  # bytes of a message that is a single result

Kind = Literal["score", "bad", "raised", "timeout", "missing"]


@dataclass(frozen=True)
class Result:
    """The result of one call for one sample.

    Attributes:
        kind: `score`, `bad` (no score), `raised` (an exception), `timeout`, or `missing` (an `Unscored`).
        score: None if the call leaves the score to another, and for kinds other than `score`.
        extra: further values of the sample, where there are any.
        text: what was wrong, or the traceback.
        reason: of a `missing` score, a `Reason`.
    """

    kind: Kind
    score: float | None = None
    extra: dict[str, Any] | None = None
    text: str = ""
    reason: str = ""

    def plain(self) -> list[Any]:
        """The result as JSON can hold it."""
        return [self.kind, self.score, self.extra, self.text, self.reason]

    @classmethod
    def of_plain(cls, kind: Any, score: Any, extra: Any, text: Any, reason: Any) -> "Result":
        """The result that `plain` made plain.

        Raises:
            ValueError: it is none.
        """
        if kind not in get_args(Kind) or not isinstance(text, str):
            raise ValueError(f"a result of kind {kind!r}")
        if kind == "missing":
            Reason(reason)  # a ValueError if it is none
        if not (score is None or is_number(score)) or not (extra is None or isinstance(extra, dict)):
            raise ValueError("a result with a score that is no number")
        return cls(kind, None if score is None else float(score), extra, text, str(reason))


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def encode_result(result: Result) -> bytes:
    """Return a single result as bytes.

    Raises:
        ValueError, TypeError, RecursionError: its `extra` is not of numbers, text, lists and dicts, or too long.
    """
    data = json.dumps(result.plain(), default=_as_plain).encode()
    if len(data) > LARGEST_RESULT:
        raise ValueError(f"it has {len(data)} bytes, and may have {LARGEST_RESULT}")
    return data


def decode_result(data: bytes) -> Result:
    """Return the result that a process sent.

    Raises:
        MalformedMessage: it is none.
    """
    try:
        return Result.of_plain(*json.loads(data))
    except (ValueError, TypeError, RecursionError) as error:
        raise MalformedMessage(f"{type(error).__name__}: {error}") from None


def _as_plain(value: Any) -> Any:
    """An array or a number of numpy or torch as JSON can hold it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.100} is neither a number nor text, list or dict")
