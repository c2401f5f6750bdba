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
    roots: Sequence[str] = _PPO

    def target(self, name: str) -> str | None:
        """The current name of `name`, which is the old key or a key below it."""
        return None if self.new is None else self.new + name[len(self.old) :]

    def translated(self, value: Any) -> Any:
        """The value under the current name; raises KeyError if it cannot be used."""
        return value if self.values is None else self.values[str(value).lower()]


@dataclass(frozen=True)
class Pending:
    """Settings that are not supported yet; the fields are explained in pending.yaml."""

    prefixes: Sequence[str]
    keys: Mapping[str, Any]
    why: str
    instead: str
    declared: Sequence[str] = field(default=())
    roots: Sequence[str] = _PPO

    def items(self) -> Iterator[tuple[str, Any]]:
        """Dotted keys with their defaults; `...` for keys whose default the schema declares."""
        for prefix in self.prefixes:
            for name, default in {**self.keys, **dict.fromkeys(self.declared, ...)}.items():
                yield f"{prefix}.{name}", default


@dataclass(frozen=True, eq=False)
class Unselected:
    """Settings of an engine that is not selected; the fields are explained in unselected.yaml."""

    engine: str
    selected_by: str
    prefixes: Sequence[str]
    keys: Sequence[str]
    roots: Sequence[str] = _PPO

    def items(self) -> Iterator[str]:
        """Dotted keys."""
        return (f"{prefix}.{name}" for prefix in self.prefixes for name in self.keys)

    def notice(self, names: Sequence[str]) -> str:
        """The one notice for all such keys that are set."""
        they = "they belong" if len(names) > 1 else "it belongs"
        return f"no effect in this run, {they} to {self.engine} and {self.selected_by}: {', '.join(names)}"


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
def unselected() -> tuple[Unselected, ...]:
    """Settings of engines that are not selected."""
    return tuple(Unselected(**entry) for entry in _read("unselected"))


def _read(name: str) -> Any:
    import yaml  # imported only to compose a configuration: every process of a run imports the schema

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"), Loader=loader)
