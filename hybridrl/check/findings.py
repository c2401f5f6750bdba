"""Results of the checks of a run: problems, warnings, facts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hybridrl.errors import ConfigError, UserError


@dataclass
class Findings:
    """The results of checks.

    Attributes:
        problems: why the run would be refused or fail.
        warnings: what may spoil it.
        sections: printed lines by title.
        facts: the same for programs.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    sections: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def refuse(self, error: Exception) -> None:
        """Add what an error says."""
        faults = error.faults if isinstance(error, ConfigError) else [str(error)]
        self.problems += [fault for fault in faults if fault not in self.problems]

    def attempt(self, check: Callable[[], Any], otherwise: Any = None) -> Any:
        """Return the result of a check; `otherwise` where it refuses.

        After a first problem, other exceptions are its consequences.
        """
        try:
            return check()
        except UserError as error:
            self.refuse(error)
        except Exception:
            if not self.problems:
                raise
        return otherwise

    def attempt_all(self, checks: Iterable[Callable[[], Any]]) -> None:
        """Run checks that do not depend on each other."""
        for check in checks:
            self.attempt(check)

    def say(self, title: str, *lines: str) -> None:
        """Add lines to a section."""
        self.sections.setdefault(title, []).extend(lines)

    @property
    def status(self) -> int:
        """The exit status."""
        return 2 if self.problems else 0
