"""Losses, tools, agent loops and other entries that a program or a notebook registered itself, for other processes.

Worker processes import modules and files; what a notebook's cell or the started script defines is in neither. Such
entries are written to a file with cloudpickle, which `model.external_lib` then names like any module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl import registry
from hybridrl.errors import ConfigError
from hybridrl.utils.pickled_objects import write_object

_MAIN = "__main__"


@dataclass(frozen=True)
class RegisteredEntry:
    """An entry of a registry.

    Attributes:
        registry: name of the registry in `hybridrl.registry`.
        name: the entry's name.
        entry: the function or class.
        metadata: of the entry.
    """

    registry: str
    name: str
    entry: Any
    metadata: Any


@dataclass(frozen=True)
class RegisteredEntries:
    """Entries of a program; `register` adds them in the process that loads them."""

    entries: tuple[RegisteredEntry, ...]

    def register(self) -> None:
        """Add the entries, but for those that this process has, because it is the program itself.

        Raises:
            UserError: a name belongs to another entry.
        """
        for each in self.entries:
            target: registry.Registry[Any] = getattr(registry, each.registry)
            if not target.has_same(each.name, each.entry):
                target.add(each.name, each.entry, each.metadata)


def entries_of_main() -> RegisteredEntries:
    """Return the entries that the program's own module registered: cells of a notebook, or the started script."""
    return RegisteredEntries(tuple(_entries_of_main()))


def _entries_of_main() -> Iterator[RegisteredEntry]:
    for name, value in vars(registry).items():
        if isinstance(value, registry.Registry):
            for entry_name, entry in value.objects.items():
                if getattr(entry, "__module__", None) == _MAIN and ":" not in entry_name:
                    yield RegisteredEntry(name, entry_name, entry, value.metadata(entry_name))


def write_entries(folder: Path) -> Path | None:
    """Write the entries of the program's own module into a folder; None if there are none.

    Raises:
        ConfigError: an entry cannot be pickled.
    """
    entries = entries_of_main()
    if not entries.entries:
        return None
    names = ", ".join(f"{getattr(registry, each.registry).kind} {each.name!r}" for each in entries.entries)
    try:
        return write_object(entries, folder, "entries")
    except Exception as error:  # objects that they refer to may raise anything
        raise ConfigError(
            f"{names}: registered by this program, and cannot be sent to the worker processes "
            f"({type(error).__name__}: {error}). Something refers to an object that exists in this process only, such "
            "as a lock, an open file or a client: create that inside the function, or put the code into a file and "
            "name it by external_lib=FILE.py"
        ) from error
