"""Names of settings: declared ones, old spellings, names not supported yet, and suggestions for unknown ones.

Every assignment, from the command line or from a file, goes through `KeyBook.rewrite` before composition.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.config.convert import nearest, show
from hybridrl.config.own_settings import may_be_own
from hybridrl.config.schema.node import declared, default_of, is_free
from hybridrl.config.schema.root import ROOTS, SHARED_GROUPS
from hybridrl.config.verl.tables import Pending, Unselected, aliases, pending, unselected


@dataclass(frozen=True)
class Assignment:
    """One key set to one value; `origin` states where, as a clause to append to the key (may be empty)."""

    key: str
    value: Any
    origin: str = ""
    delete: bool = False


@dataclass
class Outcome:
    """The result of rewriting a number of assignments."""

    assignments: list[Assignment] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    unselected: dict[Unselected, list[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        """Add the result of further assignments."""
        self.assignments += other.assignments
        self.renamed += other.renamed
        self.faults += other.faults
        for entry, keys in other.unselected.items():
            self.unselected.setdefault(entry, []).extend(keys)

    def notices(self) -> list[str]:
        """The notices for the user, each once; the keys of one unselected engine share a line."""
        without_effect = [entry.notice(list(dict.fromkeys(keys))) for entry, keys in self.unselected.items()]
        return list(dict.fromkeys([*self.renamed, *without_effect]))


class KeyBook:
    """The keys of one tree.

    Args:
        root: a name from `ROOTS`.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.fields = declared(ROOTS[root])
        self.free = {name for name, item in self.fields.items() if is_free(item)}
        self._aliases = {alias.old: alias for alias in aliases() if self._has(alias.roots, alias.old, alias.new)}
        self._pending = {
            key: (entry, value) for entry in pending() for key, value in entry.items() if self._has(entry.roots, key)
        }
        self._unselected = {
            key: entry for entry in unselected() for key in entry.items() if self._has(entry.roots, key)
        }
        every = (*self.fields, *self._pending, *self._unselected, *self._aliases)
        self.groups = {name[:i] for name in every for i, letter in enumerate(name) if letter == "."}

    def _has(self, roots: Sequence[str], *keys: str | None) -> bool:
        """Whether keys of these trees are keys of this one: it is among them, or shares the groups that hold them."""
        other, groups = SHARED_GROUPS.get(self.root, ("", ()))
        shared = all(key is None or key.startswith(tuple(f"{name}." for name in groups)) for key in keys)
        return self.root in roots or (other in roots and shared)

    def known(self) -> list[str]:
        """Every key that may be written, for suggestions."""
        return sorted({*self.fields, *self._pending, *self._unselected})

    def free_parent(self, name: str) -> str | None:
        """The free-form mapping that holds this key, if any."""
        return next((name[:i] for i, letter in enumerate(name) if letter == "." and name[:i] in self.free), None)

    def kind(self, name: str) -> str:
        """`acting`, `alias`, `pending`, `unselected`, `group` or `unknown`."""
        if self._find(self._aliases, name):
            return "alias"
        if self._find(self._pending, name):
            return "pending"
        if name in self.fields or self.free_parent(name):
            return "acting"
        if self._find(self._unselected, name):
            return "unselected"
        return "group" if name in self.groups else "unknown"

    def flatten(self, tree: Mapping[str, Any], origins: Mapping[str, str], prefix: str = "") -> Iterable[Assignment]:
        """The leaves of a nested mapping; a free-form mapping has one leaf per top-level entry."""
        for name, value in tree.items():
            path = f"{prefix}{name}"
            walk = isinstance(value, Mapping) and (value or path in self.groups)
            if walk and path not in self.free and self.free_parent(path) is None:
                yield from self.flatten(value, origins, f"{path}.")
            else:
                yield Assignment(path, value, origins.get(path, ""))

    @staticmethod
    def _find(table: Mapping[str, Any], name: str) -> tuple[str, Any] | None:
        """The table's entry for `name` or for its longest listed parent."""
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            if (prefix := ".".join(parts[:count])) in table:
                return prefix, table[prefix]
        return None

    def rewrite(self, assignments: Iterable[Assignment]) -> Outcome:
        """Rename old keys, refuse unsupported ones, drop those without effect, and report unknown ones."""
        out = Outcome()
        weak: list[Assignment] = []
        given = set()
        for item in assignments:
            for single in self._renamed(item, out, weak):
                given.add(single.key)
                self._sort_in(single, out)
        for item in weak:
            if item.key not in given:
                self._sort_in(item, out)
        return out

    def _renamed(self, item: Assignment, out: Outcome, weak: list[Assignment]) -> list[Assignment]:
        found = self._find(self._aliases, item.key)
        if found is None:
            return [item]
        _, alias = found
        if item.value is None and not item.delete:
            return []
        target = alias.target(item.key)
        try:
            value = item.value if item.delete else alias.translated(item.value)
        except KeyError:
            out.faults.append(f"{item.key}={show(item.value)}{item.origin}: {alias.note}")
            return []
        if target is None or (value is None and item.value is not None):
            out.renamed.append(f"{item.key}={show(item.value)}{item.origin} has no effect: {alias.note}")
            return []
        note = f" ({alias.note})" if alias.note else ""
        out.renamed.append(f"{item.key}{item.origin} is now {target}{note}")
        renamed = Assignment(target, value, item.origin, item.delete)
        if alias.weak:
            weak.append(renamed)
            return []
        return [renamed]

    def _sort_in(self, item: Assignment, out: Outcome) -> None:
        """Sort one assignment with a current name into the outcome."""
        if (waiting := self._find(self._pending, item.key)) is not None:
            entry, default = waiting[1]
            self._weigh(item, entry, default, out)
        elif item.key in self.fields or self.free_parent(item.key):
            out.assignments.append(item)
        elif (other := self._find(self._unselected, item.key)) is not None:
            if not item.delete:
                out.unselected.setdefault(other[1], []).append(f"{item.key}{item.origin}")
        elif may_be_own(item.key, self.groups, self.fields):
            out.assignments.append(item)  # checked against its group once the chosen entry is known
        elif item.key in self.groups:
            if item.delete or item.value not in ({}, None):  # null: a group without any value set
                what = "deleted" if item.delete else f"set to {show(item.value)}"
                out.faults.append(
                    f"{item.key}{item.origin}: a group of settings cannot be {what}; name a key inside it"
                )
        else:
            out.faults.append(f"{item.key}{item.origin}: unknown key{self.suggest(item.key)}")

    def _weigh(self, item: Assignment, entry: Pending, default: Any, out: Outcome) -> None:
        """Handle a key that is not supported yet: accepted at its default, refused otherwise."""
        if item.key in self.fields:
            out.assignments.append(item)
            default = default_of(self.fields[item.key])
        if item.delete or item.value is None or _same(item.value, default):
            return
        out.faults.append(
            f"{item.key}={show(item.value)}{item.origin}: not supported yet: {entry.why}. {entry.instead}"
        )

    def suggest(self, name: str) -> str:
        """The nearest valid keys for an unknown one: by whole name, and by equal last part."""
        known = self.known()
        last = name.rsplit(".", 1)[-1]
        same_end = [key for key in known if key.rsplit(".", 1)[-1] == last and key in self.fields]
        if same_end:
            close = sorted(same_end, key=lambda key: -_likeness(key, name))[:3]
            return f"; nearest: {', '.join(close)}"
        return nearest(name, known) or "; `--cfg job` prints every key"


def _likeness(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def _same(value: Any, default: Any) -> bool:
    """Whether a value means the default, in any spelling."""
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return list(value) == list(default)
    if isinstance(value, str) and not isinstance(default, str):
        return value.lower() == str(default).lower()
    return bool(value == default)
