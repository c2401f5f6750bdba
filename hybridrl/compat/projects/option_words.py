"""Settings in the words of a command line: `--name value`, `--name=value` and `--name` alone."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.compat.projects.project_settings import SettingTable, WrittenSetting
from hybridrl.errors import ConfigError
from hybridrl.utils.shell_script import ShellCommand, named_by_path, read_commands

_OPTION = re.compile(r"--?[A-Za-z]")


def option_settings(words: Sequence[str], table: SettingTable) -> list[WrittenSetting]:
    """Read the options of a command, with their values.

    Args:
        words: the words after the program.
        table: the settings, which tell how many values an option has; an unknown one has all that follow.
    """
    settings, rest = [], [word for word in words if word.strip()]
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        name = option.lstrip("-")
        row = table.row(name)
        if not _OPTION.match(word):
            settings.append(WrittenSetting(word, True, word))
            continue
        values = [value] if equals else []
        limit = 0 if equals else _most_values(row.kind if row else "words", row.count if row else 0)
        while len(values) < limit and rest and not _OPTION.match(rest[0]):
            values.append(rest.pop(0))
        text = " ".join([word, *map(shlex.quote, values)]) if not equals else word
        many = row is not None and row.kind in ("words", "numbers")
        settings.append(WrittenSetting(name, values if many and values else " ".join(values) if values else True, text))
    return settings


def _most_values(kind: str, count: int) -> int:
    return {"flag": 0, "words": 10_000, "numbers": count}.get(kind, 1)


@dataclass(frozen=True)
class StartedCommands:
    """The commands that a script starts, and how it ended: the end of a message, empty if well."""

    commands: list[ShellCommand]
    ending: str = ""


def commands_of(words: Sequence[str]) -> StartedCommands:
    """The commands of `SCRIPT [WORDS]`, or the command line after `--`.

    A command inside a quoted word, as `srun bash -c "..."` has it, is one of its own.

    Raises:
        ConfigError: the script cannot be read, or starts programs by their paths.
    """
    if words[0] == "--":
        return StartedCommands(_with_quoted([ShellCommand(list(words[1:]), Path.cwd())]))
    script = Path(words[0])
    if script.is_file() and (by_path := named_by_path(script)):
        raise ConfigError(
            f"{script} names programs by their paths, which would start even for a report: {'; '.join(by_path)}. "
            "Change them to the bare name (python, torchrun, ...)"
        )
    reading = read_commands(script, words[1:], seconds=20, goes_on=True)
    last = " ".join(reading.errors.split()[-30:]) or "set the variables that it needs"
    return StartedCommands(
        _with_quoted(reading.commands), f"; it ended with status {reading.status}: {last}" if reading.status else ""
    )


def _with_quoted(commands: Sequence[ShellCommand]) -> list[ShellCommand]:
    result = []
    for command in commands:
        result.append(command)
        for word in command.words:
            if "--" in word and len(parts := _split(word)) > 3:
                result.append(ShellCommand(parts, command.folder))
    return result


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return []
