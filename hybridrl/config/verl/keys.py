"""Names of settings: declared ones, old spellings, names not supported yet, and suggestions for unknown ones.

Every assignment, from the command line or from a file, goes through `KeyBook.rewrite` before composition.
"""

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.config.convert import show
from hybridrl.config.entry_settings import may_be_own
from hybridrl.config.schema.node import declared, is_free
from hybridrl.config.schema.root import ROOTS, SHARED_GROUPS
from hybridrl.config.verl.tables import NoEffect, Pending, aliases, no_effect, pending

#: where a word of the command line was set
COMMAND_LINE = " (command line)"


@dataclass(frozen=True)
class Assignment:
    """One key set to one value; `origin` states where, as a clause to append to the key (may be empty)."""

    key: str
    value: Any
    origin: str = ""
    delete: bool = False


@dataclass(frozen=True)
class _Waiting:
    """A key of something that is not supported yet, set to a value."""

    entry: Pending
    item: Assignment
    is_default: bool

    def assignment_text(self) -> str:
        return f"{self.item.key}={show(self.item.value)}{self.item.origin}"


@dataclass
class RewriteResult:
    """The result of rewriting a number of assignments.

    Attributes:
        assignments: those to make, under present names.
        renamed: notices about old names.
        replaced: notices about words of a command line that a later word replaces.
        without_effect: keys that are passed with a notice.
        wrong: a sentence for each assignment that cannot be made, except those of `waiting`.
        waiting: the last value of each key of something that is not supported yet.
        unread: keys that the chosen training engine does not read, by that choice.
        computed: values of names from several of which keys are computed, with the origin of each.
    """

    assignments: list[Assignment] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    without_effect: dict[NoEffect, list[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    waiting: dict[str, _Waiting] = field(default_factory=dict)
    unread: dict[str, list[str]] = field(default_factory=dict)
    computed: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def set_aside(self, reader: Callable[[str, str], str | None]) -> None:
        """Move the waiting keys of training engines that were not chosen to `unread`.

        Args:
            reader: returns, for a key and the name of the group class that it belongs to, the choice by which it is
                not read; None if it is read.
        """
        for key, value in list(self.waiting.items()):
            choice = reader(key, value.entry.reads) if value.entry.reads else None
            if choice is not None:
                del self.waiting[key]
                if not value.is_default:
                    self.unread.setdefault(choice, []).append(f"{key}{value.item.origin}")

    def add(self, other: "RewriteResult") -> None:
        """Add the result of further assignments, which come later than those before."""
        self.assignments += other.assignments
        self.renamed += other.renamed
        self.replaced += other.replaced
        self.wrong += other.wrong
        self.waiting |= other.waiting
        self.computed |= other.computed
        for entry, keys in other.without_effect.items():
            self.without_effect.setdefault(entry, []).extend(keys)

    @property
    def faults(self) -> list[str]:
        """A sentence for each fault; keys of one unsupported thing share a sentence with the key that turns it on."""
        sentences = [*self.wrong]
        for key, value in self.waiting.items():
            switches = value.entry.switches_of(key)
            if value.is_default or (switches and key not in switches):
                continue
            others = [
                name
                for name, other in self.waiting.items()
                if other.entry is value.entry and name not in switches and other.entry.switches_of(name) == switches
                if not other.is_default
            ]
            too = f" {', '.join(others)} {'go' if len(others) > 1 else 'goes'} with it." if others and switches else ""
            text = value.assignment_text()
            sentences.append(f"{text}: not supported yet: {value.entry.why}. {value.entry.instead}{too}")
        return sentences

    def notices(self) -> list[str]:
        """The notices for the user, each once; keys of one entry share a line."""
        without_effect = [entry.notice(list(dict.fromkeys(keys))) for entry, keys in self.without_effect.items()]
        for choice, keys in self.unread.items():
            without_effect.append(f"no effect here, {choice} does not read: {', '.join(dict.fromkeys(keys))}")
        idle: dict[str, list[str]] = {}
        for key, value in self.waiting.items():
            switches = value.entry.switches_of(key)
            on = any(name in self.waiting and not self.waiting[name].is_default for name in switches)
            if switches and key not in switches and not value.is_default and not on:
                idle.setdefault(" or ".join(switches), []).append(f"{key}{value.item.origin}")
        for names, keys in idle.items():
            without_effect.append(f"no effect here without {names}: {', '.join(keys)}")
        replaced = [f"on the command line, {', '.join(self.replaced)}"] if self.replaced else []
        return list(dict.fromkeys([*self.renamed, *replaced, *without_effect]))


@functools.cache
def key_book(root: str) -> "KeyBook":
    """The keys of the tree `root`, built once."""
    return KeyBook(root)


class KeyBook:
    """The keys of one tree.

    Args:
        root: a name from `ROOTS`.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.fields = declared(ROOTS[root])
        self.free = {name for name, item in self.fields.items() if is_free(item)}
        relevant = [alias for alias in aliases() if self._has(alias.roots, alias.old, alias.new)]
        self._aliases = {alias.old: alias for alias in relevant if not alias.twin}
        self.twins = {alias.old: alias.new for alias in relevant if alias.twin and alias.new is not None}
        self._pending = {
            key: (entry, value) for entry in pending() for key, value in entry.items() if self._has(entry.roots, key)
        }
        self._no_effect = {
            key: (entry, value) for entry in no_effect() for key, value in entry.items() if self._has(entry.roots, key)
        }
        every = (*self.fields, *self._pending, *self._no_effect, *self._aliases)
        self.groups = {name[:i] for name in every for i, letter in enumerate(name) if letter == "."}

    def _has(self, roots: Sequence[str], *keys: str | None) -> bool:
        """Whether keys of these trees are keys of this one: it is among them, or shares the groups that hold them."""
        other, groups = SHARED_GROUPS.get(self.root, ("", ()))
        shared = all(key is None or key.startswith(tuple(f"{name}." for name in groups)) for key in keys)
        return self.root in roots or (other in roots and shared)

    def all_keys(self) -> list[str]:
        """Every key that may be written, for suggestions."""
        return sorted({*self.fields, *self._pending, *self._no_effect})

    def free_parent(self, name: str) -> str | None:
        """The free-form mapping that holds this key, if any."""
        return next((name[:i] for i, letter in enumerate(name) if letter == "." and name[:i] in self.free), None)

    def kind(self, name: str) -> str:
        """`acting`, `alias`, `pending`, `no effect`, `group` or `unknown`."""
        if self._find(self._aliases, name):
            return "alias"
        if self._find(self._pending, name):
            return "pending"
        if name in self.fields or self.free_parent(name):
            return "acting"
        if self._find(self._no_effect, name):
            return "no effect"
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

    def rewrite(self, assignments: Iterable[Assignment], *, has_defaults: bool = False) -> RewriteResult:
        """Rename old keys, refuse unsupported ones, drop those without effect, and report unknown ones.

        Two values for one setting are a fault, with one exception: of two words of a command line that write the same
        key, the later one counts, because scripts put the words of their user (`"$@"`) after their own. A notice names
        both. It does so, too, for a weak old name, which verl's own trees write next to the present one.

        Args:
            assignments: in the order in which they were written.
            has_defaults: values of the tree itself are among them, which any name of the setting replaces.
        """
        out = RewriteResult()
        weak: list[tuple[Assignment, Assignment]] = []
        places: dict[str, tuple[Assignment, Assignment]] = {}
        for item in assignments:
            for single in self._renamed(item, out, weak):
                earlier = places.get(single.key)
                if earlier is not None and has_defaults:
                    del places[single.key]
                elif earlier is not None and earlier[0].key == item.key and item.origin == COMMAND_LINE:
                    del places[single.key]
                    if not item.delete and not _alike(earlier[1].value, single.value):
                        out.replaced.append(
                            f"{item.key}={show(item.value)} replaces {show(earlier[0].value)} before it"
                        )
                self._note(item, single, places, out)
                self._sort_in(single, out)
        for item, single in weak:
            if single.key not in places:
                self._sort_in(single, out)
            elif item.origin == COMMAND_LINE and not _alike(places[single.key][1].value, single.value):
                written = places[single.key][0]
                out.replaced.append(f"{written.key}={show(written.value)} replaces {item.key}={show(item.value)}")
        return out

    def conflicts(self, assignments: Iterable[Assignment]) -> list[str]:
        """A sentence for each setting that is given two values, under one name or under several."""
        out, weak = RewriteResult(), list[tuple[Assignment, Assignment]]()
        places: dict[str, tuple[Assignment, Assignment]] = {}
        for item in assignments:
            weak += [(item, single) for single in self._renamed(item, RewriteResult(), weak)]
        for item, single in weak:
            self._note(item, single, places, out)
        return out.wrong

    def _note(
        self,
        written: Assignment,
        item: Assignment,
        places: dict[str, tuple[Assignment, Assignment]],
        out: RewriteResult,
    ) -> None:
        """Note where a key is set, and report a second value for it.

        Args:
            written: the assignment under the name that the user wrote.
            item: the same under the present name.
            places: the assignments so far by present name, in both forms. A deletion (`~key`) begins anew.
        """
        if item.delete:
            for key in [key for key in places if key == item.key or key.startswith(f"{item.key}.")]:
                del places[key]
            return
        if (earlier := places.get(item.key)) is not None and not _alike(earlier[1].value, item.value):
            first = f"{earlier[0].key}={show(earlier[0].value)}{earlier[0].origin}"
            second = f"{written.key}={show(written.value)}{written.origin}"
            same = "" if earlier[0].key == written.key == item.key else f", which both set {item.key}"
            out.wrong.append(f"{first} and {second}: two values for one setting{same}; remove one of them")
        places[item.key] = (written, item)

    def _renamed(
        self, item: Assignment, out: RewriteResult, weak: list[tuple[Assignment, Assignment]]
    ) -> list[Assignment]:
        match = self._find(self._aliases, item.key)
        if match is None:
            return [item]
        _, alias = match
        if item.value is None and not item.delete:
            return []
        if alias.computed:
            if item.delete:
                out.computed.pop(item.key, None)
            else:
                out.computed[item.key] = item.value, item.origin
            return []
        target = alias.target(item.key)
        try:
            value = item.value if item.delete else alias.translated(item.value)
        except KeyError:
            out.wrong.append(f"{item.key}={show(item.value)}{item.origin}: {alias.note}")
            return []
        if target is None or (value is None and item.value is not None):
            out.renamed.append(f"{item.key}={show(item.value)}{item.origin} has no effect: {alias.note}")
            return []
        note = f" ({alias.note})" if alias.note else ""
        out.renamed.append(f"{item.key}{item.origin} is now {target}{note}")
        renamed = Assignment(target, value, item.origin, item.delete)
        if alias.weak:
            weak.append((item, renamed))
            return []
        return [renamed]

    def _sort_in(self, item: Assignment, out: RewriteResult) -> None:
        """Sort one assignment with a current name into the outcome."""
        if (waiting := self._find(self._pending, item.key)) is not None:
            entry, default = waiting[1]
            self._weigh(item, entry, default, out)
        elif item.key in self.fields or self.free_parent(item.key):
            out.assignments.append(item)
        elif (other := self._find(self._no_effect, item.key)) is not None:
            idle, default_values = other[1]
            if not item.delete and not (other[0] == item.key and _same(item.value, default_values)):
                out.without_effect.setdefault(idle, []).append(f"{item.key}{item.origin}")
        elif may_be_own(item.key, self.groups, self.fields):
            out.assignments.append(item)  # checked against its group once the chosen entry is known
        elif item.key in self.groups:
            if item.delete or item.value not in ({}, None):  # null: a group without any value set
                fate = "deleted" if item.delete else f"set to {show(item.value)}"
                out.wrong.append(f"{item.key}{item.origin}: a group of settings cannot be {fate}; name a key inside it")
        else:
            out.wrong.append(f"{item.key}{item.origin}: unknown key{self.suggest(item.key)}")

    def _weigh(self, item: Assignment, entry: Pending, default: Any, out: RewriteResult) -> None:
        """Note a key of something that is not supported yet: at its default nothing would be different."""
        is_default = item.delete or item.value is None or _same(item.value, default)
        out.waiting[item.key] = _Waiting(entry, item, is_default)

    def suggest(self, name: str) -> str:
        """The nearest valid keys for an unknown one, as the end of a sentence: those of the same branch first.

        In each group, from the innermost that exists outwards, a key with the same last part counts as nearest.
        """
        valid_keys, parts = self.all_keys(), name.split(".")
        for depth in range(len(parts) - 1, -1, -1):
            group = "".join(f"{part}." for part in parts[:depth])
            if group and group[:-1] not in self.groups:
                continue
            inside = [key for key in valid_keys if key.startswith(group)]
            same_end = [key for key in inside if key.rsplit(".", 1)[-1] == parts[-1] and key in self.fields]
            if same_end:
                close = sorted(same_end, key=lambda key: -_likeness(key, name))[:3]
                return f"; nearest: {', '.join(close)}"
            rest = name.removeprefix(group)
            if close := difflib.get_close_matches(rest, [key.removeprefix(group) for key in inside], n=3, cutoff=0.5):
                return f"; nearest: {', '.join(group + key for key in close)}"
        return "; `--cfg job` prints every key"


def _likeness(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def _alike(first: Any, second: Any) -> bool:
    """Whether two values that were written for a key are the same, in any spelling."""
    if first is None or second is None:
        return first is second
    return _same(first, second) or _same(second, first)


def _same(value: Any, default: Any) -> bool:
    """Whether a value means the default, in any spelling."""
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return list(value) == list(default)
    if isinstance(value, str) and not isinstance(default, str):
        return value.lower() == str(default).lower()
    return bool(value == default)
