"""The report of `hybridrl import` on one run of a script: the state of each setting, and the command to paste."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.config.compose import compose_config
from hybridrl.config.convert import show
from hybridrl.errors import ConfigError
from hybridrl.programs import PROGRAMS

MAPPED, NO_EFFECT, REFUSED, UNKNOWN = "mapped", "no effect here", "refused", "unknown"


@dataclass(frozen=True)
class SettingState:
    """The state of one setting of a script.

    Attributes:
        word: the setting as the script has it.
        state: `mapped`, `no effect here`, `refused` or `unknown`.
        why: the settings here, or the reason.
    """

    word: str
    state: str
    why: str = ""

    def line(self) -> str:
        """The line of the report."""
        return f"  {self.state:16}{self.word}{f' ({self.why})' if self.why else ''}"


@dataclass
class RunReport:
    """The report on one run.

    Attributes:
        heading: the script and what it starts.
        program: the program of hybridrl; empty if there is none for it.
        settings: each setting of the script, once.
        notes: further lines.
        defaults: lines on defaults of the project that the command sets, because hybridrl has others.
        differences: what the project does by default and nothing here does.
        preparation: lines of shell before the command.
        words: the words of the command.
    """

    heading: str
    program: str = ""
    settings: list[SettingState] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    preparation: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def add(self, state: str, word: str, why: str = "") -> None:
        """Add the state of a setting."""
        self.settings.append(SettingState(word, state, why))

    @property
    def can_run(self) -> bool:
        """Whether every setting has a meaning here, so that the command is the same run."""
        return bool(self.program) and not any(item.state in (REFUSED, UNKNOWN) for item in self.settings)

    def faults(self) -> list[str]:
        """Compose the settings of the command, and return what is wrong with them; nothing is started."""
        if not self.program:
            return []
        program = PROGRAMS[self.program]
        try:
            compose_config(program.tree, self.words, defaults=program.defaults)
        except ConfigError as error:
            return list(error.faults)
        return []

    def text(self) -> str:
        """The report, with the command at its end."""
        lines = [self.heading, *(item.line() for item in self.settings), *(f"  {note}" for note in self.notes)]
        if self.differences:
            lines += ["not here:", *(f"  {line}" for line in self.differences)]
        if self.defaults:
            lines += [
                "defaults that the command sets, as hybridrl has others:",
                *(f"  {line}" for line in self.defaults),
            ]
        if any(item.state == REFUSED for item in self.settings) and self.program:
            lines.append("  the refused settings have to go; the command is without them:")
        if self.program:
            lines += ["", *self.preparation, *command_lines(self.program, self.words)]
        return "\n".join(lines)


def command_lines(program: str, words: Sequence[str]) -> list[str]:
    """The lines of a command, one word each, as a shell reads them."""
    continued = [f"    {shlex.quote(word)}" for word in words]
    return [
        f"hybridrl {program}" + (" \\" if words else ""),
        *(f"{line} \\" for line in continued[:-1]),
        *continued[-1:],
    ]


def written(value: Any) -> str:
    """A value as a word of the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(written(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{written(item)}' for name, item in value.items())}}}"
    return value if isinstance(value, str) else show(value)
