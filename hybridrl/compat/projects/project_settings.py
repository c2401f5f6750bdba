"""Tables of another project's settings: each one's default there, and what it means here."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.compat.projects.run_report import MAPPED, NO_EFFECT, REFUSED, UNKNOWN, RunReport, written
from hybridrl.config.schema.node import default_tree
from hybridrl.config.schema.root import ROOTS
from hybridrl.config.short_names import RefusedValueError, placed
from hybridrl.programs import PROGRAMS


@dataclass(frozen=True)
class Ineffective:
    """A setting without effect in a run with these other settings, and the reason."""

    reason: str


@dataclass(frozen=True)
class ReadWith:
    """A setting that acts through another one, which sets the keys."""

    place: str


Meaning = Mapping[str, Any] | Ineffective | ReadWith
Translator = Callable[[Any, "ProjectValues"], Meaning]


@dataclass(frozen=True, eq=False)
class ProjectSetting:
    """One row of a table.

    Attributes:
        names: the name, then names of older versions; `*` stands for any text.
        key: the key that it sets, with groups in braces as short names have them; empty if `translate` says which.
        kind: `text`, `int`, `float`, `flag`, `numbers` (a fixed count of them), `words` (any count) or `json`.
        count: the count of `numbers`.
        default: its default in the project; None: unset.
        translate: returns the keys with their values; it may read other settings, and raise `RefusedValueError`. It
            gets the value, or with a `*` in the name the `WrittenSetting`.
        covers: names of settings that have this one's value where it is set and they are not.
        idle: why it has no effect; empty if it has one.
        refused: why every value but those of `usual` is refused, and what to do.
        usual: values that ask for nothing special, besides the default.
        secret: its value is a password or a key, which reports do not show.
    """

    names: tuple[str, ...]
    key: str = ""
    kind: str = "text"
    count: int = 2
    default: Any = None
    translate: Translator | None = None
    covers: tuple[str, ...] = ()
    idle: str = ""
    refused: str = ""
    usual: tuple[Any, ...] = ()
    secret: bool = False

    def meaning(self, value: Any, values: ProjectValues) -> Meaning:
        """The keys that a value sets.

        Raises:
            RefusedValueError: the value is refused.
        """
        if self.idle:
            return Ineffective(self.idle)
        if self.refused:
            if value == self.default or value in self.usual:
                return {}
            raise RefusedValueError(self.refused)
        return {self.key: value} if self.translate is None else self.translate(value, values)


@dataclass(frozen=True)
class WrittenSetting:
    """A setting as a script has it.

    Attributes:
        name: its name, without what marks it as an option.
        value: text, a list of texts, True for an option without a value, or a value of a TOML file.
        text: all of it as the script has it, for the report.
    """

    name: str
    value: Any
    text: str


class ProjectValues:
    """The values of all settings of a project: those of a script, and the defaults of the others.

    Args:
        table: the settings.
        settings: those of the script.
    """

    def __init__(self, table: SettingTable, settings: Sequence[WrittenSetting]) -> None:
        self.table = table
        self.faults: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self.settings = list(settings)
        #: settings that the script does not set, by the one that covers them
        self.covered: dict[str, str] = {}
        for item in settings:
            if (row := table.row(item.name)) is not None and "*" not in row.names[0]:
                try:
                    self._values[row.names[0]] = converted(row, item.value)
                    self.covered |= dict.fromkeys(row.covers, row.names[0])
                except ValueError as error:
                    self.faults[item.name] = str(error)

    def __getitem__(self, name: str) -> Any:
        row = self.table.row(name)
        assert row is not None, name
        name = row.names[0]
        return self._values.get(name, self._values.get(self.covered.get(name, name), row.default))

    def has(self, name: str) -> bool:
        """Whether the script sets it."""
        return name in self._values


@dataclass(frozen=True, eq=False)
class SettingTable:
    """The settings of one program of a project.

    Attributes:
        title: the project, for messages.
        rows: the settings.
        program: returns the program of hybridrl for a run.
        constant: returns what the project does in every such run, by key.
        differences: returns what it does by default, and nothing here does.
        look: where an unknown name may be explained.
    """

    title: str
    rows: tuple[ProjectSetting, ...]
    program: Callable[[ProjectValues], str]
    constant: Callable[[ProjectValues], Mapping[str, Any]] = lambda _: {}
    differences: Callable[[ProjectValues], list[str]] = lambda _: []
    look: str = "hybridrl --help, docs/coming_from.md"
    _exact: dict[str, ProjectSetting] = field(default_factory=dict)
    _patterns: dict[str, ProjectSetting] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows:
            for name in row.names:
                place = self._patterns if "*" in name else self._exact
                assert name not in place, name
                place[name] = row

    def row(self, name: str) -> ProjectSetting | None:
        """The row of a name; None if the project has no such setting."""
        if name in self._exact:
            return self._exact[name]
        for pattern, row in self._patterns.items():
            if fnmatch.fnmatchcase(name, pattern):
                return row
        return None


def converted(row: ProjectSetting, value: Any) -> Any:
    """A written value in the kind of its setting.

    Raises:
        ValueError: it is no such value.
    """
    texts = [str(item) for item in value] if isinstance(value, list) else [str(value)]
    if row.kind == "flag":
        return str(value).lower() not in ("false", "none", "0")
    if row.kind in ("int", "float"):
        if value in (None, "None", "none", "null"):
            return None
        if value is True or len(texts) != 1:
            raise ValueError("a number is missing")
        number = float(texts[0])
        return int(number) if row.kind == "int" and number.is_integer() else number
    if row.kind == "numbers":
        if value is True or len(texts) != row.count:
            raise ValueError(f"{row.count} numbers are needed")
        return [float(text) for text in texts]
    if row.kind == "words":
        return [] if value is True else texts
    if row.kind == "json":
        return json.loads(value) if isinstance(value, str) else value
    if value is True:
        raise ValueError("its value is missing or empty")
    return " ".join(texts) if isinstance(value, list) else value


#: what a translator raises for a value of the wrong kind
_NOT_UNDERSTOOD = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


class _Run:
    """The assignments of one run, and its report."""

    def __init__(self, table: SettingTable, settings: Sequence[WrittenSetting], heading: str) -> None:
        self.table, self.values = table, ProjectValues(table, settings)
        self.report = RunReport(heading, table.program(self.values))
        self.tree = PROGRAMS[self.report.program].tree
        self.assigned: dict[str, Any] = {}

    def placed(self, meaning: Mapping[str, Any]) -> dict[str, Any]:
        """The keys with their groups at the tree's places.

        Raises:
            RefusedValueError: the tree has no such key.
        """
        keys = {}
        for key, value in meaning.items():
            place = placed(self.tree, key)
            if place is None:
                raise RefusedValueError(f"there is no {key.replace('{', '').replace('}', '')} in {self.tree}")
            keys[place] = value
        return keys

    def read(self, item: WrittenSetting, is_last: bool) -> None:
        """Report a setting of the script."""
        row = self.table.row(item.name)
        if row is None:
            self.report.add(UNKNOWN, item.text, f"{self.table.title} has no such setting that is known here: look at "
                            f"{self.table.look}")  # fmt: skip
            return
        if row.secret:
            item = replace(item, text=item.text.replace(str(item.value), "***"))
        if not is_last:
            self.report.add(NO_EFFECT, item.text, "it is set again, and the last one counts")
            return
        try:
            if item.name in self.values.faults and not row.idle:
                raise RefusedValueError(self.values.faults[item.name])
            value = item if "*" in row.names[0] else self.values[row.names[0]]
            meaning = row.meaning(value, self.values)
            if isinstance(meaning, Ineffective):
                self.report.add(NO_EFFECT, item.text, meaning.reason)
                return
            if isinstance(meaning, ReadWith):
                self.report.add(MAPPED, item.text, f"with {meaning.place}")
                return
            keys = self.placed(meaning)
        except RefusedValueError as refusal:
            self.report.add(REFUSED, item.text, str(refusal))
            return
        except _NOT_UNDERSTOOD as error:
            self.report.add(REFUSED, item.text, f"its value is not understood ({type(error).__name__}: {error})")
            return
        self.assigned |= keys
        why = ", ".join(f"{key}={written(value)}" for key, value in keys.items())
        self.report.add(MAPPED, item.text, why or "as it is here anyway")

    def read_default(self, row: ProjectSetting) -> None:
        """Set what a default of the project means, where hybridrl's own is another."""
        try:
            meaning = row.meaning(row.default, self.values)
            if isinstance(meaning, Ineffective | ReadWith):
                return
            keys = self.placed(meaning)
        except RefusedValueError as refusal:
            self.report.differences.append(f"{row.names[0]}={written(row.default)}, the default: {refusal}")
            return
        except _NOT_UNDERSTOOD:  # of another setting, which is refused
            return
        self._assign_default(keys, f"{row.names[0]}={written(row.default)}")

    def read_constant(self) -> None:
        """Set what the project does in every run, and tell what it does and nothing here does."""
        try:
            keys = self.placed(self.table.constant(self.values))
            self.report.differences += self.table.differences(self.values)
        except _NOT_UNDERSTOOD as error:
            self.report.differences.append(f"a number makes no sense ({error}): sizes of batches are not computed")
            return
        self._assign_default(keys, f"{self.table.title} does so")

    def _assign_default(self, keys: Mapping[str, Any], origin: str) -> None:
        differing = {
            key: value
            for key, value in keys.items()
            if key not in self.assigned and value != default_of(self.tree, key, self.report.program)
        }
        self.assigned |= differing
        if differing:
            self.report.defaults.append(
                f"{', '.join(f'{key}={written(value)}' for key, value in differing.items())} ({origin})"
            )


def translate_run(table: SettingTable, settings: Sequence[WrittenSetting], heading: str) -> RunReport:
    """Report what becomes of the settings of one run.

    Args:
        table: the settings of its program.
        settings: those of the script, in its order.
        heading: the first line of the report, without the program here.
    """
    run = _Run(table, settings, heading)
    names = [_own_name(table, item.name) for item in settings]
    for at, item in enumerate(settings):
        run.read(item, names[at] not in names[at + 1 :])
    for setting in table.rows:
        name = setting.names[0]
        if setting.default is not None and not run.values.has(name) and name not in run.values.covered:
            run.read_default(setting)
    run.read_constant()
    report = run.report
    report.heading = f"{heading} -> hybridrl {report.program}"
    report.words = [f"{key}={word_of(value)}" for key, value in run.assigned.items()]
    return report


def _own_name(table: SettingTable, name: str) -> str:
    """The name of a setting in the newest version; a pattern has none."""
    setting = table.row(name)
    return name if setting is None or "*" in setting.names[0] else setting.names[0]


#: texts that the command line would read as something else
_OTHERWISE = re.compile(r"[-+\d._eE]*\d[-+\d._eE]*|true|false|null|none|~|", re.IGNORECASE)


def word_of(value: Any) -> str:
    """A value in the grammar of the command line."""
    text = written(value)
    if isinstance(value, str) and (_OTHERWISE.fullmatch(text) or any(letter in text for letter in " ,=[]{}()'\"\\\n#")):
        return json.dumps(text, ensure_ascii=False)
    return text


def default_of(tree: str, key: str, program: str) -> Any:
    """The default of a key for a program; None for one that other settings decide."""
    defaults = PROGRAMS[program].defaults
    if key in defaults:
        return defaults[key]
    value: Any = default_tree(ROOTS[tree])
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def row(names: str, key: str = "", *, kind: str = "text", **more: Any) -> ProjectSetting:
    """A row of a table, its names separated by spaces."""
    return ProjectSetting(tuple(names.split()), key, kind, **more)


def read_with(place: str) -> Translator:
    """A translator of a setting that acts through another one."""
    return lambda *_: ReadWith(place)


def flag(names: str, key: str = "", **more: Any) -> ProjectSetting:
    """A row of a setting that is on or off, and off by default."""
    return row(names, key, kind="flag", **{"default": False, **more})


def idle(names: str, reason: str, *, kind: str = "text") -> tuple[ProjectSetting, ...]:
    """Rows of settings without effect; names of the same setting are joined by `|`."""
    return tuple(row(each.replace("|", " "), kind=kind, idle=reason) for each in names.split())


def refused(names: str, reason: str, *usual: Any, kind: str = "text") -> tuple[ProjectSetting, ...]:
    """Rows of settings that are refused; names of the same setting are joined by `|`."""
    return tuple(row(each.replace("|", " "), kind=kind, refused=reason, usual=usual) for each in names.split())
