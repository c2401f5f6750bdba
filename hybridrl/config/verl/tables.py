"""Typed access to the YAML files next to this module, which list verl's keys that no group of the schema declares."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PPO = ("ppo_trainer",)


@dataclass(frozen=True)
class Alias:
    """One old name, of a key or of everything below it; the fields are explained in aliases.yaml."""

    old: str
    new: str | None
    note: str = ""
    values: Mapping[str, Any] | None = None
    weak: bool = False
    twin: bool = False
    computed: bool = False
    roots: Sequence[str] = _PPO

    def target(self, name: str) -> str | None:
        """The current name of `name`, which is the old key or a key below it."""
        return None if self.new is None else self.new + name[len(self.old) :]

    def translated(self, value: Any) -> Any:
        """The value under the current name; raises KeyError if it cannot be used."""
        return value if self.values is None else self.values[str(value).lower()]


@dataclass(frozen=True, eq=False)
class Pending:
    """Settings of something that is not supported yet; the fields are explained in pending.yaml."""

    prefixes: Sequence[str]
    keys: Mapping[str, Any]
    why: str
    instead: str
    switch: Sequence[str] = ()
    reads: str = ""
    roots: Sequence[str] = _PPO

    def items(self) -> Iterator[tuple[str, Any]]:
        """Dotted keys with their defaults."""
        for prefix in self.prefixes:
            for name, default in self.keys.items():
                yield _below(prefix, name), default

    def switches_of(self, key: str) -> list[str]:
        """The keys that turn on what `key` belongs to; empty if each key of this entry stands for itself."""
        prefix = max((prefix for prefix in self.prefixes if key.startswith(_below(prefix, ""))), key=len)
        return [_below(prefix, name) for name in self.switch]


@dataclass(frozen=True, eq=False)
class NoEffect:
    """Settings without effect here; the fields are explained in no_effect.yaml."""

    why: str
    prefixes: Sequence[str]
    keys: Sequence[str] | Mapping[str, Any]
    roots: Sequence[str] = _PPO

    def items(self) -> Iterator[tuple[str, Any]]:
        """Dotted keys with their defaults; `...` for keys that always deserve a notice."""
        defaults = self.keys if isinstance(self.keys, Mapping) else dict.fromkeys(self.keys, ...)
        for prefix in self.prefixes:
            for name, default in defaults.items():
                yield _below(prefix, name), default

    def notice(self, names: Sequence[str]) -> str:
        """The one notice for all such keys that are set."""
        return f"no effect here, {self.why}: {', '.join(names)}"


@dataclass(frozen=True)
class Choice:
    """The choices of some of verl's config groups; the fields are explained in choices.yaml."""

    roots: Sequence[str]
    groups: Sequence[str]
    same: Sequence[str] = ()
    means: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    instead: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """Every option that verl has."""
        return (*self.same, *self.means, *self.why)


@dataclass(frozen=True)
class Base:
    """One of verl's base files; the fields are explained in bases.yaml."""

    tree: str
    choices: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    instead: str = ""


@dataclass(frozen=True)
class VerlProgram:
    """One of verl's programs; the fields are explained in programs.yaml."""

    tree: str | None
    module: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    instead: str = ""


@functools.cache
def bases() -> Mapping[str, Base]:
    """verl's base files, by name."""
    return {name: Base(**entry) for name, entry in _read("bases").items()}


@functools.cache
def programs() -> Mapping[str, VerlProgram]:
    """verl's programs, by module."""
    return {name: VerlProgram(**entry) for name, entry in _read("programs").items()}


@functools.cache
def aliases() -> tuple[Alias, ...]:
    """Old names of settings."""
    return tuple(
        Alias(old=old, roots=group["roots"], **(entry if isinstance(entry, dict) else {"new": entry}))
        for group in _read("aliases")
        for old, entry in group["names"].items()
    )


@functools.cache
def pending() -> tuple[Pending, ...]:
    """Settings that are not supported yet."""
    return tuple(Pending(**entry) for entry in _read("pending"))


@functools.cache
def no_effect() -> tuple[NoEffect, ...]:
    """Settings without effect here."""
    return tuple(NoEffect(**entry) for entry in _read("no_effect"))


@functools.cache
def idle_notices() -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Settings that verl's scripts set where they cannot act, below the trees that have them: (trees, names)."""
    return tuple((tuple(entry["roots"]), tuple(entry["keys"])) for entry in _read("idle"))


@functools.cache
def choices() -> tuple[Choice, ...]:
    """Choices of verl's config groups."""
    return tuple(Choice(**entry) for entry in _read("choices"))


def _below(prefix: str, name: str) -> str:
    """The dotted key of a name in a group; the prefix of a whole tree is empty."""
    return f"{prefix}.{name}" if prefix else name


def _read(name: str) -> Any:
    import yaml  # imported only to compose a configuration: every process of a run imports the schema

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"), Loader=loader)
