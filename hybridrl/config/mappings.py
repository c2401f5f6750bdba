"""The context that readers of mappings get, and their registration; see `hybridrl.config.schema.mappings`.

A reader lives next to the code that takes the entries, in a module `mappings` of its package, and imports it only when
there are entries to check.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hybridrl.config.convert import nearest
from hybridrl.config.schema.conditions import Lookup, read
from hybridrl.registry import MAPPING_READERS
from hybridrl.utils.entry_metadata import EntryMetadata

#: the only entry of a setting that names a file: the file
FILE = "file"


@dataclass(frozen=True)
class Entries:
    """The entries of a mapping that a reader checks.

    Attributes:
        key: the mapping's name in the tree.
        values: its entries; `{FILE: name}` of a setting that names a file with mappings.
        lookup: reads other settings by their names.
    """

    key: str
    values: Mapping[str, Any]
    lookup: Lookup

    def near(self, name: str) -> Any:
        """Another setting, named from the mapping's group as conditions name it; `...` if there is none."""
        return read(name, self.key.rpartition(".")[0], self.lookup)[1]

    def contradictions(self, settings: Mapping[str, str]) -> list[str]:
        """A sentence for each entry that is a setting, too, which was set to another value.

        Args:
            settings: the name of the setting, as conditions name it, for each entry that is one.
        """
        faults = []
        for name, value in self.values.items():
            if name not in settings:
                continue
            key, other = read(settings[name], self.key.rpartition(".")[0], self.lookup)
            set_keys = self.lookup("set_keys")
            if set_keys is not ... and key in set_keys and other is not ... and other != value:
                faults.append(
                    f"{self.key}.{name}={value} and {key}={other} are the same thing; set the latter alone, or remove "
                    "one of them"
                )
        return faults

    def unknown(self, names: Iterable[str], taker: str) -> list[str]:
        """A sentence for each entry whose name is not among `names`, those that `taker` takes."""
        valid = sorted(names)
        return [
            f"{self.key}.{name}={value}: {taker} has no such entry{nearest(name, valid) or _listed(valid)}; remove it, "
            "or correct its name"
            for name, value in self.values.items()
            if name not in valid
        ]


def _listed(names: list[str], most: int = 12) -> str:
    if not names:
        return "; it takes none"
    return f"; there are: {', '.join(names[:most])}{', ...' if len(names) > most else ''}"


Reader = Callable[[Entries], Iterable[str]]
R = TypeVar("R", bound=Reader)


def reads_mapping(name: str) -> Callable[[R], R]:
    """Function decorator: `key(..., read_by=NAME)` is checked by this function, which yields a sentence per fault."""

    def add(reader: R) -> R:
        MAPPING_READERS.add(name, reader, EntryMetadata())
        return reader

    return add
