"""Read the commands that a shell script would start, without starting them.

The script runs in bash. Nothing is on the PATH but tools without side effects and stand-ins for Python and its
launchers, which write their words down. A script may change the PATH, e.g. to activate an environment, so bash restores
the stand-ins before every command.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.errors import ConfigError

STAND_INS = "HYBRIDRL_STAND_INS"  # the variable with the folder of the stand-ins
PYTHONS = ("python", "python3")
LAUNCHERS = (*PYTHONS, "torchrun", "ray", "accelerate")
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
trap '{ PATH=$HYBRIDRL_STAND_INS; OPTIONS; } 2>/dev/null' DEBUG
command_not_found_handle() { printf '%s\\0' "$PWD" "$@" "$(printf '\\036')" >> "$HYBRIDRL_COMMANDS"; }
source() { if [ -r "$1" ]; then builtin source "$@"; fi; }
cd() { builtin cd "$@" || return 0; }
ulimit() { return 0; }
set -o noclobber
"""
_FUNCTION = '{name}() {{ "$HYBRIDRL_STAND_INS/{name}" "$@"; }}\n'
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


@dataclass(frozen=True)
class ShellCommand:
    """One command that a script starts and that bash does not know: its words, and the folder it starts in."""

    words: list[str]
    folder: Path


@dataclass(frozen=True)
class ShellReading:
    """The commands of a script, and how bash ended: its exit status and the end of its standard error."""

    commands: list[ShellCommand]
    status: int
    errors: str


def read_commands(
    script: Path,
    words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    seconds: float = 60,
    goes_on: bool = False,
) -> ShellReading:
    """Run a script in bash without its programs, and return the commands that it would start.

    Assignments, functions, loops and redirections take place; a redirection that would overwrite a file fails.

    Args:
        script: the script.
        words: its arguments.
        environment: environment variables in addition to this process's own.
        folder: the working directory; None: that of this process.
        seconds: how long the script may take.
        goes_on: a command that fails does not end the script, whatever `set -e` says: without its programs some do.

    Raises:
        ConfigError: there is no such script, or no bash, or the script does not end in time.
    """
    bash = bash_for(script)
    with tempfile.TemporaryDirectory() as place:
        tools, commands, before = Path(place, "bin"), Path(place, "commands"), Path(place, "before.sh")
        tools.mkdir()
        reading = _READING.replace("OPTIONS", "set +e" if goes_on else ":")
        before.write_text(reading + "".join(_FUNCTION.format(name=name) for name in LAUNCHERS), encoding="utf-8")
        for name in _HARMLESS:
            if executable := shutil.which(name):
                (tools / name).symlink_to(executable)
        for name in LAUNCHERS:
            write_tool(tools / name, _RECORDER.format(name=name))
        for name in ("nohup", "exec", "time"):
            write_tool(tools / name, _WRAPPER)
        write_tool(tools / "tee", _TEE)
        if executable := shutil.which("sed"):
            write_tool(tools / "sed", _SED.format(sed=shlex.quote(executable)))
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
    return ShellReading(_commands(written), process.returncode, errors[-2000:])


def named_by_path(script: Path) -> list[str]:
    """The places where a script names Python or a launcher by its path, which no stand-in can replace.

    Returns:
        `line N: PATH`, for lines that are no comments.

    Raises:
        ConfigError: there is no such script.
    """
    bash_for(script)
    lines = script.read_text(encoding="utf-8", errors="replace").splitlines()
    return [
        f"line {number}: {match[1]}"
        for number, line in enumerate(lines, start=1)
        if not line.lstrip().startswith("#")
        for match in _BY_PATH.finditer(line)
    ]


def bash_for(script: Path) -> str:
    """Return the path of bash.

    Raises:
        ConfigError: there is no such script, or no bash.
    """
    if not script.is_file():
        raise ConfigError(f"{script}: no such script (from {Path.cwd()})")
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError("bash is not installed; it reads the script")
    return bash


def write_tool(path: Path, text: str) -> None:
    """Write an executable file."""
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def _commands(written: str) -> list[ShellCommand]:
    """The commands among the words that the stand-ins wrote down."""
    commands, words = [], list[str]()
    for word in written.split("\0"):
        if word != _END:
            words.append(word)
            continue
        folder, *line = words
        words = []
        commands.append(ShellCommand(line, Path(folder)))
    return commands
