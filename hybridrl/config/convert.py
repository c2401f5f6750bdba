"""Conversion of a resolved tree of plain values to typed groups; every fault is collected."""

import dataclasses
import difflib
import functools
import math
import operator
import os
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.config.schema.node import ValueLimits, is_group

_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


class _Fault(Exception):
    """A value that does not fit; the message is the rest of a sentence that begins with the key."""


def show(value: Any) -> str:
    """Format a value as a user would write it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) else str(value)


def nearest(name: str, candidates: Sequence[str], count: int = 3) -> str:
    """Return `; nearest: a, b` with the known names most similar to `name`, or an empty string."""
    close = difflib.get_close_matches(name, candidates, n=count, cutoff=0.5)
    return f"; nearest: {', '.join(close)}" if close else ""


def put(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted key in nested dicts; mappings merge."""
    *parents, last = name.split(".")
    for part in parents:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    if isinstance(value, Mapping) and isinstance(tree.get(last), dict):
        for inner, element in value.items():
            put(tree[last], str(inner), element) if "." not in str(inner) else tree[last].__setitem__(inner, element)
    else:
        tree[last] = dict(value) if isinstance(value, Mapping) else value


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Return whether a field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def missing_keys(cls: type, tree: Mapping[str, Any]) -> list[str]:
    """Return the keys without a default that `tree` does not have: `build` needs them."""
    return [field.name for field in dataclasses.fields(cls) if is_required(field) and field.name not in tree]


@functools.cache
def _types_of(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def build(
    cls: type, tree: Mapping[str, Any], faults: dict[str, str], origins: Mapping[str, str], prefix: str = ""
) -> Any:
    """Make a group of type `cls` from plain values; settings missing from `tree` keep their defaults.

    Args:
        cls: a dataclass of this package.
        tree: values by name; sub-groups as nested mappings.
        faults: receives, by dotted key, a sentence for each value that does not fit.
        origins: where a key was set, by dotted key, for the message.
        prefix: dotted path of this group, ending in a dot.
    """
    values: dict[str, Any] = {}
    types_of = _types_of(cls)
    for field in dataclasses.fields(cls):
        if field.name not in tree:
            continue
        value, name = tree[field.name], f"{prefix}{field.name}"
        if is_group(field):
            if isinstance(value, Mapping):
                values[field.name] = build(field.type, value, faults, origins, f"{name}.")  # type: ignore[arg-type]
            else:
                faults[name] = f"{name}={show(value)}{origins.get(name, '')}: a group of settings, not one value"
            continue
        try:
            limits = field.metadata.get("limits", ValueLimits())
            value = next((meaning for spelling, meaning in limits.means if value is spelling), value)
            values[field.name] = within_limits(fit_type(value, types_of[field.name]), limits)
        except _Fault as fault:
            empty = "no value; it " if value == "" else ""
            faults[name] = f"{name}={show(value)}{origins.get(name, '')}: {empty}{fault}"
            if is_required(field):
                values[field.name] = value  # the group cannot be made without it
    return cls(**values)


def within_limits(value: Any, limits: ValueLimits) -> Any:
    """Return the value in its canonical spelling, or raise a fault if it is outside the limits."""
    if isinstance(value, list):
        return [within_limits(element, limits) for element in value]
    if isinstance(value, dict):
        return {name: within_limits(element, limits) for name, element in value.items()}
    if isinstance(value, str):
        value = limits.synonyms.get(value, value)
    if (limits.choices or limits.registry) and isinstance(value, str):
        if value in limits.later:
            raise _Fault(f"known, but this build does not support it yet; use {_one_of(limits.names())}")
        if limits.registry is None and value not in limits.choices:
            hint = nearest(str(value), [str(choice) for choice in limits.choices], 1)
            number = "a whole number or " if limits.ge is not None else ""
            raise _Fault(f"must be {number}{_one_of(limits.choices)}{hint}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        bounds = (
            (limits.ge, operator.ge, "at least"),
            (limits.gt, operator.gt, "greater than"),
            (limits.le, operator.le, "at most"),
            (limits.lt, operator.lt, "less than"),
        )
        for bound, holds, words in bounds:
            if bound is not None and not holds(value, bound):
                raise _Fault(f"must be {words} {bound}")
    return value


def _one_of(choices: Sequence[Any]) -> str:
    return str(choices[0]) if len(choices) == 1 else "one of " + ", ".join(map(str, choices))


def fit_type(value: Any, expected: Any) -> Any:
    """Convert a value to a type if the conversion is lossless, else raise `_Fault`."""
    origin = typing.get_origin(expected)
    if expected is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _fit_union(value, typing.get_args(expected))
    if value is None and origin in (list, dict):  # none of them
        value = origin()
    if origin is list:
        (element,) = typing.get_args(expected)
        if isinstance(value, str):
            value = _listed(value) if value else []
        if not isinstance(value, list | tuple):
            raise _Fault(f"must be a list of {_words(element)}")
        return [fit_type(item, element) for item in value]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _Fault("must be a mapping, {name: value, ...}")
        return {str(name): fit_type(item, typing.get_args(expected)[1]) for name, item in value.items()}
    scalars = {bool: _fit_bool, int: _fit_int, float: _fit_float, str: _fit_str}
    if expected not in scalars:  # from a user's dataclass; the schema has no other types
        raise _Fault(f"is declared as {expected}; a setting is a bool, int, float, str, or a list or dict of these")
    fitted = scalars[expected](value)
    if fitted is None:
        raise _Fault(f"must be {_words(expected)}")
    return fitted


def _listed(text: str) -> list[Any]:
    """A list that was quoted as text, or a list of one text."""
    if text.startswith("[") and text.endswith("]"):
        return [part.strip() for part in text[1:-1].split(",") if part.strip()]
    return [text]


def _fit_union(value: Any, members: tuple[Any, ...]) -> Any:
    """Convert to the first member type that fits; null fits only if None is a member."""
    plain = [member for member in members if member is not types.NoneType]
    if value is None:
        if types.NoneType in members:
            return None
        raise _Fault(f"must be {' or '.join(_words(member) for member in plain)}, not null")
    for member in plain:
        try:
            return fit_type(value, member)
        except _Fault as fault:
            if len(plain) == 1:
                raise _Fault(f"{fault}, or null") from None
    raise _Fault(f"must be {' or '.join(_words(member) for member in plain)}")


def _fit_bool(value: Any) -> bool | None:
    if isinstance(value, str):
        return {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}.get(value.lower())
    return value if isinstance(value, bool) else None


def _fit_int(value: Any) -> int | None:
    number = _fit_float(value)
    if number is None or not math.isfinite(number) or number != int(number):
        return None
    return value if isinstance(value, int) else int(number)


def _fit_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return None if math.isnan(number) else number


def _fit_str(value: Any) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return os.path.expanduser(value) if value.startswith("~/") else value
    return None


def _words(expected: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    if typing.get_origin(expected) is list:
        return f"a list of {_words(typing.get_args(expected)[0])}"
    return names.get(expected, str(expected))
