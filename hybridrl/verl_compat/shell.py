"""Read verl's commands out of a shell script, or run the script with each command translated.

The script runs in bash, with stand-ins for Python and its launchers first on the PATH. To read the commands, nothing
else is on the PATH but tools without side effects, and the stand-ins write their words down. To run them, the stand-ins
replace the module that follows `-m`.

A script may change the PATH, e.g. to activate an environment, so bash restores the stand-ins before every command.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridrl.config.verl.tables import VerlProgram, programs
from hybridrl.errors import ConfigError

STAND_INS = "HYBRIDRL_STAND_INS"  # the variable with the folder of the stand-ins
USERS_BASH_ENV = "HYBRIDRL_USERS_BASH_ENV"  # the variable with the user's own BASH_ENV
_PYTHONS = ("python", "python3")
_LAUNCHERS = (*_PYTHONS, "torchrun", "ray", "accelerate")
_HARMLESS = (
    *("awk", "basename", "bash", "cat", "cut", "date", "dirname", "env", "expr", "false", "getconf", "grep", "head"),
    *("hostname", "id", "jq", "ls", "nproc", "printf", "pwd", "readlink", "realpath", "seq", "sh", "sort", "tail"),
    *("tr", "true", "uname", "uniq", "wc", "whoami"),
)
_END = "\x1e"
_BY_PATH = re.compile(
    r"(?:^|[\s\"'=(`]|:-?)([^\s\"'=:;|&()`]*\bbin/(?:python(?:3(?:\.\d+)?)?|torchrun|ray|accelerate))(?=[\s\"';|&)`}]|$)"
)

# Sourced by bash before the script, to read it: what is not on the PATH is written down, and no existing file is
# overwritten. The functions are for `PATH=... python`, which the trap comes too early for.
_READING = """\
set -o functrace
trap '{ PATH=$HYBRIDRL_STAND_INS; } 2>/dev/null' DEBUG
command_not_found_handle() { printf '%s\\0' "$PWD" "$@" "$(printf '\\036')" >> "$HYBRIDRL_COMMANDS"; }
source() { if [ -r "$1" ]; then builtin source "$@"; fi; }
cd() { builtin cd "$@" || return 0; }
ulimit() { return 0; }
set -o noclobber
"""
_FUNCTION = '{name}() {{ "$HYBRIDRL_STAND_INS/{name}" "$@"; }}\n'
# Sourced by bash before the script, to run it. There are no functions here: in the background, a function would put a
# shell between the script and the program, and signals to `$!` would not reach the program. The redirection keeps the
# trap out of the output of `set -x`.
_RUNNING = """\
if [ -n "${HYBRIDRL_USERS_BASH_ENV:-}" ]; then . "$HYBRIDRL_USERS_BASH_ENV"; fi
set -o functrace
trap '{ case "$PATH:" in "$HYBRIDRL_STAND_INS:"*) ;; *) PATH=$HYBRIDRL_STAND_INS:$PATH;; esac; } 2>/dev/null' DEBUG
"""
_RECORDER = """\
#!/bin/bash
code="$*"
if [ "$1" = - ]; then code=$(cat); fi
case "$code" in *get_device_name*) echo cuda; exit 0;; esac
printf '%s\\0' "$PWD" "{name}" "$@" "$(printf '\\036')" >> "$HYBRIDRL_COMMANDS"
"""
_WRAPPER = '#!/bin/bash\nexec "$@"\n'
_TEE = "#!/bin/bash\nexec cat\n"
_SED = '#!/bin/bash\ncase " $*" in *" -i"*|*" --in-place"*) exit 0;; esac\nexec {sed} "$@"\n'
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
    """Run a script in bash without its programs, and return the commands of verl that it would start.

    Assignments, functions, loops and redirections take place; a redirection that would overwrite a file fails.

    Args:
        script: the script.
        words: its arguments.
        environment: environment variables in addition to this process's own.
        folder: the working directory; None: that of this process.
        seconds: how long the script may take.

    Raises:
        ConfigError: there is no such script, or no bash, or the script does not end in time.
    """
    bash = _bash(script)
    with tempfile.TemporaryDirectory() as place:
        tools, commands, before = Path(place, "bin"), Path(place, "commands"), Path(place, "before.sh")
        tools.mkdir()
        before.write_text(_READING + "".join(_FUNCTION.format(name=name) for name in _LAUNCHERS), encoding="utf-8")
        for name in _HARMLESS:
            if executable := shutil.which(name):
                (tools / name).symlink_to(executable)
        for name in _LAUNCHERS:
            _write_tool(tools / name, _RECORDER.format(name=name))
        for name in ("nohup", "exec", "time"):
            _write_tool(tools / name, _WRAPPER)
        _write_tool(tools / "tee", _TEE)
        if executable := shutil.which("sed"):
            _write_tool(tools / "sed", _SED.format(sed=shlex.quote(executable)))
        inherited = {**os.environ, **(environment or {})}
        ours = {"PATH": str(tools), "BASH_ENV": str(before), "HYBRIDRL_COMMANDS": str(commands)}
        process = subprocess.Popen(
            [bash, str(script.absolute()), *words],
            env={**inherited, **ours, STAND_INS: str(tools)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"{script}: does not end within {seconds:g} s when its programs are left out") from error
        finally:
            with contextlib.suppress(ProcessLookupError):  # what the script has left running, or all of it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        written = commands.read_text(encoding="utf-8", errors="replace") if commands.exists() else ""
    return ScriptReading(_commands(written), process.returncode, errors[-2000:])


def run_script(script: Path, words: Sequence[str] = ()) -> int:
    """Run a script with verl's programs replaced by those of this library; return its exit status.

    Raises:
        ConfigError: there is no such script, or no bash.
    """
    bash = _bash(script)
    with tempfile.TemporaryDirectory() as place:
        tools, before = Path(place, "bin"), Path(place, "before.sh")
        tools.mkdir()
        before.write_text(_RUNNING, encoding="utf-8")
        for name in _LAUNCHERS:
            _write_tool(tools / name, _TRANSLATOR.format(python=shlex.quote(sys.executable), name=name))
        environment = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "BASH_ENV": str(before),
            USERS_BASH_ENV: os.environ.get("BASH_ENV", ""),
            STAND_INS: str(tools),
        }
        return subprocess.run([bash, str(script), *words], env=environment, check=False).returncode


def named_by_path(script: Path) -> list[str]:
    """The places where a script names Python or a launcher by its path, which no stand-in can replace.

    Returns:
        `line N: PATH`, for lines that are no comments.

    Raises:
        ConfigError: there is no such script.
    """
    _bash(script)
    lines = script.read_text(encoding="utf-8", errors="replace").splitlines()
    return [
        f"line {number}: {match[1]}"
        for number, line in enumerate(lines, start=1)
        if not line.lstrip().startswith("#")
        for match in _BY_PATH.finditer(line)
    ]


def real_program(name: str) -> str | None:
    """The program that a stand-in stands for: that of this environment, or else the first on the PATH; None: neither.

    For `python` and `python3`, it is this interpreter.
    """
    if name in _PYTHONS:
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


def _bash(script: Path) -> str:
    if not script.is_file():
        raise ConfigError(f"{script}: no such script (from {Path.cwd()})")
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError("bash is not installed; it reads the script")
    return bash


def _write_tool(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def _commands(written: str) -> list[ScriptCommand]:
    """The commands among the words that the stand-ins wrote down."""
    commands, words = [], []
    for word in written.split("\0"):
        if word != _END:
            words.append(word)
            continue
        folder, *line = words
        words = []
        modules = [at for at, word in enumerate(line) if at and line[at - 1] == "-m" and word.startswith("verl.")]
        if modules:
            at = modules[0]
            commands.append(ScriptCommand(line[at], line[at + 1 :], Path(folder), line[: at - 1]))
    return commands
