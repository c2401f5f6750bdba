"""`python -m hybridrl.verl_compat script`: reports what happens to each setting of a shell script, and runs it."""

import argparse
import sys
import tempfile
from pathlib import Path

from hybridrl.errors import ConfigError
from hybridrl.utils.shell_script import named_by_path
from hybridrl.verl_compat.examine import Placeholders, Setting, examine, settings_of
from hybridrl.verl_compat.shell import ScriptCommand, read_script, run_script

_STATES = ("mapped", "no effect here", "not supported")


def main(arguments: list[str]) -> int:
    """Print the report on a script, then run the script unless `--report` is given; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.verl_compat script",
        description="Tell what becomes of each setting in a shell script that starts programs of verl, and run it with "
        "the programs of hybridrl. The report runs the shell code of the script without its programs.",
    )
    parser.add_argument("--report", action="store_true", help="only report")
    parser.add_argument("script", type=Path, help="the shell script")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="arguments of the script")
    args = parser.parse_args(arguments)
    try:
        if by_path := named_by_path(args.script):
            raise ConfigError(
                f"{args.script} names programs by their paths, which would start verl itself, even for a report: "
                f"{'; '.join(by_path)}. Change them to the bare name (python, torchrun, ...)"
            )
        can_run = report(args.script, args.words)
        if args.report or not can_run:
            return 0 if can_run else 2
        sys.stdout.flush()
        return run_script(args.script, args.words)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def report(script: Path, words: list[str]) -> bool:
    """Print what becomes of each setting of each command; return whether all commands can run.

    Data and models that are missing on this machine are named. They do not count: the script may fetch them.
    """
    reading = read_script(script, words)
    if reading.status != 0:
        print(f"{script} ended with status {reading.status} while it was read without its programs:")
        print("\n".join(f"  {line}" for line in reading.errors.strip().splitlines()[-3:]))
    if not reading.commands:
        print(f"{script} starts no program of verl")
        return False
    can_run = [_report_command(command) for command in reading.commands]
    return all(can_run)


def _report_command(command: ScriptCommand) -> bool:
    program = command.program
    there = f" -> python -m {program.module}" if program is not None and program.module else ""
    print(f"{command.module}{there}")
    with tempfile.TemporaryDirectory() as folder:
        faults = examine(command, Placeholders(Path(folder))).faults
    settings = settings_of(command, faults)
    for state in _STATES:
        for setting in settings:
            if setting.state == state:
                print(_line(setting))
    for fault in faults:
        print(f"  cannot run: {fault}")
    if not faults:
        for fault in examine(command).faults:
            print(f"  missing here: {fault}")
        print("  it can run")
    return not faults


def _line(setting: Setting) -> str:
    why = f" ({setting.why})" if setting.why else ""
    return f"  {setting.state:16}{setting.word}{why}"
