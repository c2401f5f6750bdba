"""Short names of settings, in Python (`hybridrl.grpo(lr=1e-6)`) and on the command line (`hybridrl grpo lr=1e-6`).

A short name is one of `hybridrl.config.short_table`, or the last part of a key that no other key of the tree has.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridrl.config.convert import show
from hybridrl.config.schema.node import declared, default_tree, is_free
from hybridrl.config.schema.root import ROOTS
from hybridrl.config.verl.keys import Assignment

#: how `--help` shows a default that is computed from other settings
FOLLOWS = "follows other settings"
#: trees with short names
TREES = ("ppo_trainer", "sft_trainer", "dpo_trainer", "kto_trainer", "rm_trainer")
_POLICY = "actor_rollout_ref"
#: where a tree has the groups that rows of the table name in braces
_PLACES = {
    "ppo_trainer": {
        "model": f"{_POLICY}.model",
        "optim": f"{_POLICY}.actor.optim",
        "engine": f"{_POLICY}.actor.fsdp_config",
        "checkpoint": f"{_POLICY}.actor.checkpoint",
        "actor": f"{_POLICY}.actor",
        "rollout": f"{_POLICY}.rollout",
    },
    **{tree: {name: name for name in ("model", "optim", "engine", "checkpoint")} for tree in TREES[1:]},
}


class RefusedValueError(ValueError):
    """A value that a short name does not take; the message is the rest of a sentence that begins with the name."""


Translation = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class ShortName:
    """One row of the table.

    Attributes:
        names: the name, then other names for the same.
        key: the key that it sets, `{group}` for a group that trees have at different places; or that by tree. Empty:
            it sets none.
        translate: returns the key's value, or a mapping of keys to values, or None for the default; it may raise
            `RefusedValueError`.
        meaning: for `--help`; empty: that of the key.
        derived: it is computed from several names (`hybridrl.config.short_derived`).
        idle: why it has no effect; empty if it has one.
        refused: why every value but those of `usual` is refused, and what to do.
        usual: values that mean that nothing special is asked for.
        default: what `--help` shows; empty: the default of the key, unless the value is translated.
        common: it is listed in docstrings.
    """

    names: tuple[str, ...]
    key: str | Mapping[str, str] = ""
    translate: Translation | None = None
    meaning: str = ""
    derived: bool = False
    idle: str = ""
    refused: str = ""
    usual: tuple[Any, ...] = (None,)
    default: str = ""
    common: bool = False

    def key_in(self, tree: str) -> str | None:
        """The key in a tree; None if the tree has none, "" if the name sets none anywhere."""
        key = self.key if isinstance(self.key, str) else self.key.get(tree)
        return None if key is None else placed(tree, key)


def placed(tree: str, key: str) -> str | None:
    """A key with its groups at the tree's places; None if the tree has no such key."""
    if not key:
        return ""
    if key.startswith("{"):
        group, _, rest = key[1:].partition("}")
        if group not in _PLACES[tree]:
            return None
        key = f"{_PLACES[tree][group]}{rest}"
    fields = declared(ROOTS[tree])
    free = any(is_free(fields[key[:i]]) for i, letter in enumerate(key) if letter == "." and key[:i] in fields)
    return key if key in fields or free else None


@dataclass
class ShortSettings:
    """The meaning of short names.

    Attributes:
        assignments: the keys that they set.
        derived: values of names that are computed later, with the origin of each.
        notices: names without effect.
        faults: a sentence for each name that cannot be used.
    """

    assignments: list[Assignment] = field(default_factory=list)
    derived: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def read(self, tree: str, name: str, value: Any, origin: str = "") -> None:
        """Add a name with its value.

        Args:
            tree: the tree of settings.
            origin: where it was written, as a clause to append to the name.
        """
        row = rows(tree).get(name)
        if row is None:
            keys = last_parts(tree).get(name, ())
            if len(keys) == 1:
                self.assignments.append(Assignment(keys[0], value, origin))
            elif keys:
                choices = ", ".join(keys)
                self.faults.append(f"{name}=: several settings are called so; choose one by its whole key: {choices}")
            else:
                self.faults.append(f"{name}=: no setting is called so{nearest_names(tree, name)}")
            return
        text = f"{name}={show(value)}{origin}"
        if row.refused:
            if value not in row.usual:
                self.faults.append(f"{text}: {row.refused}")
        elif row.idle:
            if value not in row.usual:
                self.notices.append(f"{text} has no effect: {row.idle}")
        elif row.derived:
            self._derive(row.names[0], name, value, origin)
        else:
            self._translate(tree, row, name, value, origin)

    def _derive(self, row_name: str, name: str, value: Any, origin: str) -> None:
        earlier = self.derived.get(row_name)
        if earlier is not None and earlier[0] != value:
            self.faults.append(f"{name}={show(value)}{origin}: {row_name}={show(earlier[0])} is given as well")
        self.derived[row_name] = (value, origin)

    def _translate(self, tree: str, row: ShortName, name: str, value: Any, origin: str) -> None:
        key = row.key_in(tree)
        assert key is not None, name
        try:
            meaning = value if row.translate is None else row.translate(value)
        except RefusedValueError as refusal:
            self.faults.append(f"{name}={show(value)}{origin}: {refusal}")
            return
        if meaning is None and row.translate is not None:
            return
        settings = meaning if isinstance(meaning, Mapping) and row.translate is not None else {key: meaning}
        for each, setting in settings.items():
            place = placed(tree, each)
            if place is None:
                self.faults.append(f"{name}={show(value)}{origin}: {tree} has no setting for this value")
            else:
                self.assignments.append(Assignment(place, setting, origin))


@functools.cache
def rows(tree: str) -> dict[str, ShortName]:
    """The rows of the table that a tree has, by each of their names."""
    from hybridrl.config.short_table import TABLE

    by_name: dict[str, ShortName] = {}
    for row in TABLE if tree in TREES else ():
        if row.key_in(tree) is not None:
            by_name |= {name: row for name in row.names if name not in by_name}
    return by_name


@functools.cache
def last_parts(tree: str) -> dict[str, tuple[str, ...]]:
    """The keys of a tree by their last part."""
    by_name: dict[str, tuple[str, ...]] = {}
    for key in declared(ROOTS[tree]):
        last = key.rsplit(".", 1)[-1]
        by_name[last] = (*by_name.get(last, ()), key)
    return by_name


def is_short(tree: str, name: str) -> bool:
    """Whether a name without dots means something in a tree by its last part, or by the table."""
    return tree in TREES and "." not in name and (name in rows(tree) or name in last_parts(tree))


def accepted(tree: str) -> dict[str, str]:
    """Every short name of a tree that has an effect, with its key ("" if it sets several)."""
    names = {name: row.key_in(tree) or "" for name, row in rows(tree).items() if not row.idle and not row.refused}
    single = {name: keys[0] for name, keys in last_parts(tree).items() if len(keys) == 1}
    return {**single, **names}


def nearest_names(tree: str, name: str) -> str:
    """The nearest short names for an unknown one, as the end of a sentence; each with its key."""
    from hybridrl.config.short_table import OTHER_WORDS

    keys = accepted(tree)
    words = {word.replace("_", ""): others for word, others in OTHER_WORDS.items()}
    synonyms = [other for other in words.get(name.lower().replace("_", ""), ()) if other in keys]
    nearest = synonyms or _close(name.lower(), keys)
    text = ", ".join(f"{each} ({keys[each]})" if keys[each] not in ("", each) else each for each in nearest)
    return f"; nearest: {text}" if text else "; --help lists the names, and --cfg job every key"


def _close(name: str, names: Iterable[str]) -> list[str]:
    """The names that share most words, and letters, with another."""
    words = set(name.split("_"))

    def likeness(other: str) -> float:
        others = set(other.split("_"))
        shared = len(words & others) / max(len(words | others), 1)
        letters = difflib.SequenceMatcher(None, name.replace("_", ""), other.replace("_", "")).ratio()
        return max(letters, 0.4 + 0.6 * shared if shared else 0.0)

    ranked = sorted(((likeness(other), other) for other in names), key=lambda pair: (-pair[0], pair[1]))
    return [other for score, other in ranked[:3] if score >= 0.6 and score >= ranked[0][0] - 0.2]


def default_in(tree: str, key: str, defaults: Mapping[str, Any]) -> str:
    """The default of a key as `--help` shows it: a value, or the key that it follows."""
    value: Any = defaults[key] if key in defaults else default_tree(ROOTS[tree])
    for part in () if key in defaults else key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    text = str(value)
    return FOLLOWS if "${" in text else show(value)


def meaning_of(tree: str, row: ShortName) -> str:
    """The meaning of a row for a tree."""
    key = row.key_in(tree)
    setting = declared(ROOTS[tree]).get(key or "")
    return row.meaning or (setting.metadata["meaning"] if setting is not None else "")


def table_text(tree: str, defaults: Mapping[str, Any], *, common: bool = False) -> list[tuple[str, str, str]]:
    """The short names that have an effect: the names, the default and the meaning of each row.

    Args:
        defaults: of the program, by key.
        common: only those that docstrings list.
    """
    listed = []
    for row in dict.fromkeys(rows(tree).values()):
        if row.idle or row.refused or (common and not row.common):
            continue
        key = row.key_in(tree)
        default = row.default
        if not default and key and not row.derived and row.translate is None:
            default = default_in(tree, key, defaults)
        listed.append((", ".join(row.names), "" if default in ("[]", "''", "{}") else default, meaning_of(tree, row)))
    return listed


def explain(tree: str, name: str, defaults: Mapping[str, Any]) -> str | None:
    """Explain a short name or a key for `--help KEY`; None if there is no such name."""
    row = rows(tree).get(name)
    keys = [key] if row is not None and (key := row.key_in(tree)) else list(last_parts(tree).get(name, ()))
    if row is None and name in declared(ROOTS[tree]):
        keys = [name]
    lines = []
    if row is not None:
        others = [other for other in row.names if other != name]
        if row.idle or row.refused:
            lines.append(f"{name} ({'no effect' if row.idle else 'refused'}): {row.idle or row.refused}")
        else:
            lines.append(f"{name}: {meaning_of(tree, row)}" + (f" (also {', '.join(others)})" if others else ""))
    for key in keys:
        setting = declared(ROOTS[tree]).get(key)
        if setting is None:
            continue
        lines += [f"{key}: {setting.metadata['meaning']}", f"  default: {default_in(tree, key, defaults)}"]
        lines += [f"  {line}" for line in _limits(setting)]
    return "\n".join(lines) or None


def _limits(setting: "dataclasses.Field[Any]") -> list[str]:
    limits = setting.metadata["limits"]
    lines = [f"one of: {', '.join(map(str, limits.names()))}"] if limits.names() else []
    bounds = (("ge", "at least"), ("gt", "greater than"), ("le", "at most"), ("lt", "less than"))
    lines += [f"{words} {getattr(limits, name)}" for name, words in bounds if getattr(limits, name) is not None]
    return lines
