"""Read verl's commands out of a shell script, or run the script with each command translated.

To read the commands, the script runs in bash without its programs (`hybridrl.utils.shell_script`). To run them,
stand-ins first on the PATH replace the module that follows `-m`; bash restores them before every command.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridrl.config.verl.tables import VerlProgram, programs
from hybridrl.utils.shell_script import LAUNCHERS, PYTHONS, STAND_INS, bash_for, read_commands, write_tool

USERS_BASH_ENV = "HYBRIDRL_USERS_BASH_ENV"  # the variable with the user's own BASH_ENV
# Sourced by bash before the script, to run it. There are no functions here: in the background, a function would put a
# shell between the script and the program, and signals to `$!` would not reach the program. The redirection keeps the
# trap out of the output of `set -x`.
_RUNNING = """\
if [ -n "${HYBRIDRL_USERS_BASH_ENV:-}" ]; then . "$HYBRIDRL_USERS_BASH_ENV"; fi
set -o functrace
trap '{ case "$PATH:" in "$HYBRIDRL_STAND_INS:"*) ;; *) PATH=$HYBRIDRL_STAND_INS:$PATH;; esac; } 2>/dev/null' DEBUG
"""
_TRANSLATOR = '#!/bin/sh\nexec {python} -m hybridrl.verl_compat.stand_in {name} "$@"\n'


@dataclass(frozen=True)
class ScriptCommand:
    """One command of a script that starts a program of verl.

    Attributes:
        module: the module as the script names it, e.g. `verl.trainer.main_ppo`.
        words: the words after the module.
        folder: the working directory of the command.
        launcher: the words before `-m`.
    """

    module: str
    words: list[str]
    folder: Path
    launcher: list[str] = field(default_factory=list)

    @property
    def program(self) -> VerlProgram | None:
        """The program of hybridrl that the module stands for; None if the module is unknown."""
        return programs().get(self.module)


@dataclass(frozen=True)
class ScriptReading:
    """The commands of a script, and how bash ended: its exit status and the end of its standard error."""

    commands: list[ScriptCommand]
    status: int
    errors: str


def read_script(
    script: Path,
    words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    seconds: float = 60,
) -> ScriptReading:
    """Return the commands of verl that a script would start; the arguments are those of `read_commands`.

    Raises:
        ConfigError: there is no such script, or no bash, or the script does not end in time.
    """
    reading = read_commands(script, words, environment, folder, seconds)
    commands = []
    for command in reading.commands:
        line = command.words
        modules = [at for at, word in enumerate(line) if at and line[at - 1] == "-m" and word.startswith("verl.")]
        if modules:
            at = modules[0]
            commands.append(ScriptCommand(line[at], line[at + 1 :], command.folder, line[: at - 1]))
    return ScriptReading(commands, reading.status, reading.errors)


def run_script(script: Path, words: Sequence[str] = ()) -> int:
    """Run a script with verl's programs replaced by those of this library; return its exit status.

    Raises:
        ConfigError: there is no such script, or no bash.
    """
    bash = bash_for(script)
    with tempfile.TemporaryDirectory() as place:
        tools, before = Path(place, "bin"), Path(place, "before.sh")
        tools.mkdir()
        before.write_text(_RUNNING, encoding="utf-8")
        for name in LAUNCHERS:
            write_tool(tools / name, _TRANSLATOR.format(python=shlex.quote(sys.executable), name=name))
        environment = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "BASH_ENV": str(before),
            USERS_BASH_ENV: os.environ.get("BASH_ENV", ""),
            STAND_INS: str(tools),
        }
        return subprocess.run([bash, str(script), *words], env=environment, check=False).returncode


def real_program(name: str) -> str | None:
    """The program that a stand-in stands for: that of this environment, or else the first on the PATH; None: neither.

    For `python` and `python3`, it is this interpreter.
    """
    if name in PYTHONS:
        return sys.executable
    others = [folder for folder in os.get_exec_path() if folder != os.environ.get(STAND_INS)]
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), *others]))


def translated(words: Sequence[str]) -> list[str]:
    """The words of a command with verl's modules replaced by the programs of this library."""
    result = list(words)
    for before, word in enumerate(words[1:]):
        program = programs().get(word)
        if words[before] == "-m" and program is not None and program.module is not None:
            result[before + 1] = program.module
    return result
