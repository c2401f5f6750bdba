"""Results of reward functions: what they may return, and its plain form of numbers, text, lists and dicts.

Imported by the pool's processes, so it must stay light: no torch, no numpy.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.scored import LARGEST_REWARD, Scored, Unscored

#: a score (None: the function does not apply to the sample) and the function's dict, where it returned one
Score = tuple[float | None, dict[str, Any] | None]

_TIMES = ("datetime64", "timedelta64")  # of numpy, whose numbers depend on their unit
_DEPTH = 50  # levels of lists and dicts
_LARGEST_INT = 2**63  # larger ones fit into no column of a dump


class BadScore(Exception):
    """A function returned something that is not a score; the message completes "the function ..."."""


def check_score(value: Any, may_abstain: bool = False) -> Score | Unscored:
    """Return a function's result as a score and, from a dict or a `Scored`, everything in it.

    Args:
        value: what the function returned.
        may_abstain: None is allowed; it means that the function does not apply to the sample.

    Raises:
        BadScore: not a number, a dict with a number `score`, a `Scored` or an `Unscored`; or not finite.
    """
    if value is None and may_abstain:
        return None, None
    if isinstance(value, Unscored):
        return value
    if isinstance(value, Scored):
        value = {**value.extra, "score": value.reward} if value.extra else value.reward
    if isinstance(value, Mapping):
        if "score" not in value:
            raise BadScore(f"returned a dict without 'score' (keys: {', '.join(map(str, value)) or 'none'})")
        extra = {name: plain(item, name) for name, item in _named(value, "the dict").items()}
        score = extra["score"] = check_number(value["score"])
        return score, extra
    return check_number(value), None


def check_scores(values: Any, count: int, may_abstain: bool = False) -> list[Score | Unscored | BadScore]:
    """Return the result of a batched function: per sample its score, why it has none, or what is wrong with it.

    Raises:
        BadScore: not a sequence, or of another length.
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes, bytearray, memoryview)):
        raise BadScore(f"returned {type(values).__name__} instead of a list of {count} scores")
    if len(values) != count:
        raise BadScore(f"returned {len(values)} scores for {count} responses")
    scores: list[Score | Unscored | BadScore] = []
    for number, value in enumerate(values):
        try:
            scores.append(check_score(value, may_abstain))
        except BadScore as error:
            scores.append(BadScore(f"{error} for response {number} of {count}"))
    return scores


def plain(value: Any, key: str, depth: int = 0) -> Any:
    """Return a value as numbers, text, lists and dicts, which can be sent between processes and written to a dump.

    Args:
        value: what a function returned.
        key: the name it stands under, for messages.
        depth: lists and dicts around it.

    Raises:
        BadScore: it is something else, nested too deeply, or an integer too large for a column.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        if not -_LARGEST_INT <= value < _LARGEST_INT:
            raise BadScore(f"returned an integer of {value.bit_length()} bits under {key!r}; 64 bits are the most")
        return int(value)
    value = _of_any_length(value)
    if isinstance(value, float):
        return float(value)
    if depth == _DEPTH:
        raise BadScore(f"returned lists or dicts nested more than {_DEPTH} levels deep under {key!r}")
    if isinstance(value, Mapping):
        return {name: plain(item, key, depth + 1) for name, item in _named(value, repr(key)).items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, key, depth + 1) for item in value]
    for method in ("tolist", "item"):  # arrays and scalars of numpy and torch
        if hasattr(value, method):
            return plain(getattr(value, method)(), key, depth + 1)
    raise BadScore(
        f"returned {type(value).__name__} under {key!r}; besides 'score', a dict may hold numbers, text, lists and "
        "dicts"
    )


def _named(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """A dict with its keys as text, none of which may be that of two."""
    named = {str(key): item for key, item in value.items()}
    if len(named) < len(value):
        names = [str(key) for key in value]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadScore(f"returned two keys in {where} that are {twice!r} as text, of which one would be lost")
    return named


def _of_any_length(value: Any) -> Any:
    """A number of numpy with more bits than Python's, which it does not turn into one itself, as a float."""
    return float(value) if type(value).__name__ in ("longdouble", "float128", "float96") else value


def _is_masked(value: Any) -> bool:
    """Whether a masked array of numpy has no value."""
    mask: Any = getattr(value, "mask", None)
    return mask is not None and hasattr(mask, "any") and bool(mask.any())


def check_number(value: Any) -> float:
    """Return a score as a number.

    Raises:
        BadScore: it is none, is not finite, or is beyond `LARGEST_REWARD`.
    """
    if hasattr(value, "item") and not isinstance(value, (int, float)):
        if _is_masked(value) or type(value).__name__ in _TIMES:  # `item` would make a number of it
            raise BadScore(f"returned {type(value).__name__} {value!s:.60}, which is masked or a time, and no number")
        try:
            value = value.item()  # a scalar of numpy or torch
        except Exception as error:
            raise BadScore(f"returned {type(value).__name__} that is not a single number ({error})") from None
        value = _of_any_length(value)
    if not isinstance(value, (bool, int, float)):
        text = repr(value)
        raise BadScore(
            f"returned {type(value).__name__} {text[:60]}; a score must be a number, or a dict with a number 'score'"
        )
    try:
        number = float(value)
    except OverflowError:
        raise BadScore("returned an integer beyond the range of a float; a score must be finite") from None
    if not math.isfinite(number):
        raise BadScore(f"returned {number}; a score must be finite")
    if abs(number) > LARGEST_REWARD:
        raise BadScore(f"returned {number}; rewards have 32 bits, so {LARGEST_REWARD:.3g} is the largest score")
    return number
