r"""Other writings of intervals and of ordered lists: `1 < x \le 2` is `(1, 2]`, and `y=2, x=1` is `(1, 2)`."""

import re

_RELATIONS = {"<": "<", ">": ">", "<=": "<=", ">=": ">=", "lt": "<", "gt": ">"}
_RELATIONS |= dict.fromkeys(("le", "leq", "leqslant"), "<=") | dict.fromkeys(("ge", "geq", "geqslant"), ">=")
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_RELATION = re.compile(r"\\(lt|gt|leqslant|leq|le|geqslant|geq|ge)(?![A-Za-z])|([<>]=?)")
_WORD = (
    r"\s*(?:\\(?:text|mbox|textrm|mathrm)\{{\s*(?:{0})\s*\}}|\\(?:{1})(?![A-Za-z])"
    r"|(?<![A-Za-z\\])(?:{0})(?![A-Za-z]))\s*"
)
_OR, _AND = re.compile(_WORD.format("or", "cup|lor|vee")), re.compile(_WORD.format("and", "land|wedge") + r"|\s*,\s*")
_VARIABLE = re.compile(r"[A-Za-z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega)")
_INTERVAL = re.compile(r"\s*(?:\\left)?[\[(].*,.*(?:\\right)?[\])]\s*", re.DOTALL)
_NAME = r"[A-Za-z](?:_\{?\d\}?)?"
_ASSIGNED = re.compile(rf"\s*({_NAME})\s*=\s*([^=,]+?)\s*")
_MEMBER = re.compile(rf"\s*({_VARIABLE.pattern})\s*\\in(?![A-Za-z])\s*({_INTERVAL.pattern})", re.DOTALL)
#: a lower bound with its bracket, and an upper one
_Bounds = tuple[tuple[str, str], tuple[str, str]]
_LOWEST, _HIGHEST = ("(", r"-\infty"), (r"\infty", ")")


def is_interval(text: str) -> bool:
    """Whether a text may be an interval, or a union of some."""
    return all(_INTERVAL.fullmatch(part) for part in _OR.split(text))


def interval_of(text: str) -> tuple[str, str] | None:
    r"""The variable of relations such as `1 < x`, or of `x \in (1, 2)`, and the intervals that they describe.

    None where the text is something else, or names several variables.
    """
    if (member := _MEMBER.fullmatch(text)) is not None:
        return member[1], member[2]
    if not _RELATION.search(text):
        return None
    intervals, variables = [], set()
    for part in _OR.split(text):
        bounds = None
        for relation in _AND.split(part):
            bounded = _bounds_of(relation)
            if bounded is None:
                return None
            variables.add(bounded[0])
            bounds = bounded[1] if bounds is None else _both(bounds, bounded[1])
            if bounds is None:
                return None
        assert bounds is not None
        (opening, low), (high, closing) = bounds
        intervals.append(f"{opening}{low},{high}{closing}")
    return (variables.pop(), r"\cup".join(intervals)) if len(variables) == 1 else None


def in_order_of_names(text: str) -> str | None:
    """The values of assignments such as `y=2, x=1` as a list in the order of the names; None for another text."""
    parts = [_ASSIGNED.fullmatch(part) for part in _AND.split(text)]
    names = [match[1] for match in parts if match is not None]
    if len(names) < 2 or len(names) < len(parts) or len(set(names)) < len(names):
        return None
    values = {match[1]: match[2] for match in parts if match is not None}
    return f"({','.join(values[name] for name in sorted(names))})"


def _bounds_of(text: str) -> tuple[str, _Bounds] | None:
    """The variable of one relation, or of a chain of two, and its bounds."""
    words = _RELATION.split(text)  # text, name or None, sign or None, text, ...
    sides = [side.strip().strip("$") for side in words[::3]]
    signs = [_RELATIONS[name or sign] for name, sign in zip(words[1::3], words[2::3], strict=True)]
    place = next((number for number, side in enumerate(sides) if _VARIABLE.fullmatch(side)), None)
    if place is None or len(sides) > 3 or not all(sides) or (len(sides) == 3 and place != 1):
        return None
    bounds: _Bounds = (_LOWEST, _HIGHEST)
    for number, side in enumerate(sides):
        if number == place:
            continue
        sign = signs[0 if number == 0 else -1]
        above = sign if number > place else _MIRRORED[sign]  # how the variable compares with this side
        new: _Bounds = (
            (_LOWEST, (side, "]" if above == "<=" else ")"))
            if above.startswith("<")
            else (("[" if above == ">=" else "(", side), _HIGHEST)
        )
        joined = _both(bounds, new)
        if joined is None:
            return None
        bounds = joined
    return sides[place], bounds


def _both(first: _Bounds, second: _Bounds) -> _Bounds | None:
    """The bounds of two relations together; None where both bound the same side."""
    lows = [bounds[0] for bounds in (first, second) if bounds[0] != _LOWEST]
    highs = [bounds[1] for bounds in (first, second) if bounds[1] != _HIGHEST]
    if len(lows) > 1 or len(highs) > 1:
        return None
    return (lows or [_LOWEST])[0], (highs or [_HIGHEST])[0]
