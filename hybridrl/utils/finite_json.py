"""JSON without NaN and infinity, which Python's reader takes and which no number of JSON is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any


class NoNumberError(Exception):
    """A number is NaN or infinite; the message completes "line 3: ..."."""

    def __init__(self, written: str, path: str = "") -> None:
        self.written = written
        reason = "is larger than a number can be, and would be infinite" if written[-1].isdigit() else "is no number"
        super().__init__(
            f"{path or 'a value'} is {written}, which {reason}; write null for a missing value, or the number as text"
        )


def finite_json(text: str | bytes, on_nan: Callable[[], None] | None = None, **options: Any) -> Any:
    """Return the value of a JSON text.

    Args:
        text: JSON.
        on_nan: called for each NaN, which becomes a null then; None refuses NaN.
        options: of `json.loads`.

    Raises:
        NoNumberError: a number is NaN, Infinity, or too large for a float; the message has its path.
        ValueError, RecursionError: see `json.loads`.
    """

    def constant(written: str) -> None:
        if written != "NaN" or on_nan is None:
            raise NoNumberError(written)
        on_nan()

    try:
        return json.loads(text, parse_float=_finite, parse_constant=constant, **options)
    except NoNumberError as error:
        # A number does not say where it stands: read again with marks in the place of such numbers.
        marked = json.loads(text, parse_float=_marked, parse_constant=_Mark, strict=options.get("strict", True))
        raise NoNumberError(error.written, _path_of_mark(marked, error.written)) from None


class _Mark(str):
    """The text of a number that cannot be read."""


def _finite(written: str) -> float:
    number = float(written)
    if math.isinf(number):
        raise NoNumberError(written)
    return number


def _marked(written: str) -> float | _Mark:
    number = float(written)
    return _Mark(written) if math.isinf(number) else number


def _path_of_mark(value: Any, written: str, path: str = "") -> str:
    """The path of the first mark with this text in a value, as `extra_info.scores[2]`; empty: there is none."""
    if isinstance(value, _Mark):
        return path if value == written else ""
    if isinstance(value, dict):
        inner = [(f"{path}.{name}" if path else str(name), item) for name, item in value.items()]
    elif isinstance(value, list):
        inner = [(f"{path}[{number}]", item) for number, item in enumerate(value)]
    else:
        return ""
    return next(filter(None, (_path_of_mark(item, written, place) for place, item in inner)), "")
