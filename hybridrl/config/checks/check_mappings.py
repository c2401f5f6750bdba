"""Entries of mappings that nothing would read: each mapping's reader checks them (`key(..., read_by=...)`).

So are those of files with mappings that a setting names.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.config.checks.branches import branches, value_at
from hybridrl.config.checks.idle import acts
from hybridrl.config.mappings import FILE, Entries
from hybridrl.config.schema.node import declared
from hybridrl.config.schema.root import RootConfig
from hybridrl.registry import MAPPING_READERS


def check_mappings(config: RootConfig) -> Iterator[str]:
    """Yield a sentence for each entry that its reader does not take. Mappings that cannot act are left out."""
    for branch in branches(config):
        if branch.unused is not None:
            continue
        lookup = functools.partial(branch.lookup, config)
        for path, reader in _read_mappings(branch.settings).items():
            key, values = f"{branch.prefix}{path}", value_at(branch.value, path)
            if isinstance(values, str):
                values = {FILE: values}
            if isinstance(values, Mapping) and values and acts(branch, config, key):
                yield from MAPPING_READERS.get(reader)(Entries(key, values, lookup))


@functools.cache
def _read_mappings(settings: type) -> dict[str, Any]:
    """The mappings below a dataclass of settings that have a reader, and its name."""
    readers = {path: field.metadata.get("read_by") for path, field in declared(settings).items()}
    return {path: reader for path, reader in readers.items() if isinstance(reader, str)}
