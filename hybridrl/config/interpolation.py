"""Resolves `${...}` in a tree of settings, which OmegaConf does, in the part of the tree that they may refer to.

To wrap each of a tree's 700 settings in OmegaConf's nodes takes longer than all else that is done to a configuration.
"""

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

_PLAIN = (str, int, float, bool, type(None))
_MARK = "${"
# Functions that refer to nothing but what their arguments name. Others may read any setting.
_KNOWN_RESOLVERS = {"oc.select", "oc.env", "global_pool", "half_pool", "if_set"}
_RESOLVER = re.compile(r"\$\{\s*([^\s:{}$]+)\s*:")
# The name of a setting is the value of another: `${${a}}`, `${oc.select:${a}}`.
_NAMED_BY_VALUE = re.compile(r"\$\{[^}:]*\$\{|oc\.select\s*:[^,}]*\$\{")
_QUOTED = re.compile(r"['\"\\]")

_LETTER = r"[^\s${}:.,\[\]()'\"]"
_PART = re.compile(f"{_LETTER}+")
_LAST_PART = re.compile(rf"{_LETTER}+(?!\.?{_LETTER})")  # of a dotted name


def resolved(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a tree of plain values without interpolations.

    Raises:
        OmegaConfBaseException: one cannot be resolved.
        ValueError: a function in one refuses its arguments.
    """
    texts = list(_interpolations(tree))
    everything = " ".join(texts)
    part: Any = tree
    unclear = _NAMED_BY_VALUE.search(everything) or _QUOTED.search(everything)
    if not (unclear or set(_RESOLVER.findall(everything)) - _KNOWN_RESOLVERS):
        part = _named(tree, set(_LAST_PART.findall(everything)), set(_PART.findall(everything)))
    found = OmegaConf.to_container(OmegaConf.create(part), resolve=True)
    merged: dict[str, Any] = _merged(tree, found)
    return merged


def _interpolations(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        if _MARK in node:
            yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from _interpolations(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _interpolations(value)


def _named(node: dict[Any, Any], last: set[str], parts: set[str]) -> dict[Any, Any]:
    """What interpolations may refer to, and what has no plain name or value, which OmegaConf checks.

    Args:
        last: last parts of their dotted names. A group of such a name is kept with all that is in it.
        parts: all parts. A setting of such a name may be where a group was expected, which is an error.
    """
    kept = {}
    for key, value in node.items():
        if key in last or type(key) is not str or not _PART.fullmatch(key):
            kept[key] = value
        elif isinstance(value, dict):
            if inner := _named(value, last, parts):
                kept[key] = inner
        elif key in parts or type(value) not in _PLAIN or (isinstance(value, str) and _MARK in value):
            kept[key] = value
    return kept


def _merged(tree: Any, found: Any) -> Any:
    """The tree, with what was found in place of what it has."""
    if not isinstance(tree, dict) or not isinstance(found, dict):
        return found
    return {key: _merged(value, found[key]) if key in found else _copied(value) for key, value in tree.items()}


def _copied(value: Any) -> Any:
    return {key: _copied(one) for key, one in value.items()} if isinstance(value, dict) else value
