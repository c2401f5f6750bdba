"""The explanation of a setting: meaning, default, value in a run and where it was set, whether it acts."""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.config.checks.branches import branches, value_at
from hybridrl.config.checks.idle import conditional
from hybridrl.config.compose import Composed
from hybridrl.config.convert import show
from hybridrl.config.schema.node import declared, default_tree
from hybridrl.config.schema.root import ROOTS
from hybridrl.config.short_names import explain, last_parts, rows
from hybridrl.config.unread import unread_by
from hybridrl.config.verl.keys import key_book
from hybridrl.config.verl.tables import aliases


def explain_setting(tree: str, name: str, composed: Composed, defaults: Mapping[str, Any]) -> str | None:
    """Return the text about a key or a short name; None if there is no such name.

    Args:
        tree: the tree of settings.
        composed: of a run.
        defaults: values by key that replace defaults of the tree.
    """
    text = explain(tree, name, defaults)
    if text is None:
        kind = key_book(tree).kind(name)
        if kind in ("unknown", "group"):
            return None
        present = _present_name(tree, name) if kind == "alias" else None
        if present is not None:
            return f"{name} is now {present}\n{explain_setting(tree, present, composed, defaults)}"
        text = f"{name}: {_KINDS[kind]}"
    lines = [text]
    for key in _keys(tree, name):
        lines.append(f"  here: {show(value_at(composed.config, key))}{composed.origins.get(key, ' (default)')}")
        lines += [f"  {line}" for line in _effects(tree, key, composed)]
    return "\n".join(lines)


_KINDS = {
    "alias": "an old name; a run that sets it says what became of it",
    "pending": "known and not supported yet; a run that sets it says why",
    "no effect": "known, and without effect here; a run that sets it says why",
    "acting": "an entry of a free mapping",
}


def _present_name(tree: str, name: str) -> str | None:
    """The key that an old name stands for; None if there is none."""
    old = [alias for alias in aliases() if tree in alias.roots and f"{name}.".startswith(f"{alias.old}.")]
    present = old[0].target(name) if old else None
    return present if present in declared(ROOTS[tree]) else None


def _keys(tree: str, name: str) -> list[str]:
    """The keys that a name stands for."""
    if name in declared(ROOTS[tree]):
        return [name]
    row = rows(tree).get(name)
    keys = [row.key_in(tree)] if row is not None else list(last_parts(tree).get(name, ()))
    return [key for key in keys if key in declared(ROOTS[tree])]


def _effects(tree: str, key: str, composed: Composed) -> Iterator[str]:
    """Yield whether a key acts, its old names, and the keys whose defaults follow it."""
    reasons = list(reasons_without_effect(key, composed.config))
    if reasons:
        yield f"without effect: {reasons[0]}"
    others = [alias.old for alias in aliases() if alias.new == key and tree in alias.roots]
    if others:
        yield f"old names: {', '.join(others)}"
    reference = re.compile(rf"(?<![\w.]){re.escape(key)}(?![\w.])")
    book = key_book(tree)
    followers = [
        item.key
        for item in book.flatten(default_tree(ROOTS[tree]), {})
        if isinstance(item.value, str) and "${" in item.value and reference.search(item.value)
    ]
    if followers:
        yield f"followed by: {', '.join(followers)}"


def reasons_without_effect(key: str, config: Any) -> Iterator[str]:
    """Yield why a key cannot act."""
    for branch in branches(config):
        lookup = functools.partial(branch.lookup, config)
        for item in conditional(branch.settings, branch.prefix):
            if item.key == key:
                unmet = (condition.unmet(group, lookup) for condition, group in item.needs)
                yield from (f"{reason.because}; {reason.remedy}".rstrip("; ") for reason in unmet if reason is not None)
    if (choice := unread_by(config, key)) is not None:
        yield f"{choice} does not read it"
