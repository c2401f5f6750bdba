"""The one exception of this package: everything wrong with a configuration, at once."""

from collections.abc import Sequence


class ConfigError(Exception):
    """The configuration cannot be used; `faults` lists every reason, each naming its key and what to change.

    Args:
        faults: one fault, or all that were found; each is a complete sentence for the user.
    """

    def __init__(self, faults: str | Sequence[str]) -> None:
        self.faults: list[str] = [faults] if isinstance(faults, str) else list(faults)
        super().__init__(self.faults)

    def __str__(self) -> str:
        if len(self.faults) == 1:
            return self.faults[0]
        return f"{len(self.faults)} faults in the configuration:\n" + "\n".join(f"  - {fault}" for fault in self.faults)
