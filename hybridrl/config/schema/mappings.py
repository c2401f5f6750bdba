"""Mappings whose keys the user chooses: each says what checks the keys before a run (`key(..., read_by=...)`).

The name is that of a reader in `hybridrl.registry.MAPPING_READERS`: a function that knows what takes the entries, such
as the configuration class of the model, and yields a sentence for each entry that is not taken. One check calls them
all (`hybridrl.config.checks.check_mappings`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Unchecked:
    """A mapping that no reader checks.

    Attributes:
        why: what checks it instead, or why its keys are unknown before the run.
    """

    why: str
