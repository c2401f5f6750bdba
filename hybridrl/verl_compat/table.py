"""`python -m hybridrl.verl_compat table`: counts the commands in the scripts of checkouts of verl, by reason.

Data, models and GPUs are replaced by placeholders, and nothing is started. The result is the table of docs/compat.md.
"""

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hybridrl.errors import ConfigError
from hybridrl.verl_compat.examine import Examined, Placeholders, examine
from hybridrl.verl_compat.shell import ScriptReading, read_script

_FOLDERS = ("examples", "tests", "recipe")
_BEGIN, _END = "<!-- begin: scripts (python -m hybridrl.verl_compat table) -->", "<!-- end: scripts -->"
_UNSET = re.compile(r"line \d+: (\w+): (?!command not found)")


@dataclass(frozen=True)
class Counted:
    """The commands of one checkout."""

    name: str
    scripts: int
    commands: list[Examined]

    def row(self) -> str:
        """The line of the checkout in the first table."""
        tuning = [
            examined
            for examined in self.commands
            if examined.command.program and examined.command.program.tree == "sft_trainer"
        ]
        run, tuned = (sum(not examined.faults for examined in group) for group in (self.commands, tuning))
        return f"| {self.name} | {self.scripts} | {len(self.commands)} | {run} | {len(tuning)} | {tuned} |"


def main(arguments: list[str]) -> int:
    """Print the tables, or write them into a page between its markers; return the exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are placeholders: no hub is asked for them, again and again
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.verl_compat table",
        description="Count the commands in the shell scripts of checkouts of verl that can run here, and the reasons "
        "why the others cannot. Nothing is started; data, models and GPUs are placeholders.",
    )
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="[NAME=]FOLDER", help="a checkout of verl")
    parser.add_argument("--into", type=Path, help="Markdown page whose generated part is replaced")
    parser.add_argument("--each", action="store_true", help="list every command with its reasons instead")
    args = parser.parse_args(arguments)
    try:
        checkouts = [count(*_named(str(checkout))) for checkout in args.checkouts]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = "\n".join(_each(checkouts)) if args.each else tables(checkouts)
    if args.into is None:
        print(text)
        return 0
    page = args.into.read_text(encoding="utf-8")
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    args.into.write_text(f"{before}{_BEGIN}\n\n{text}\n\n{_END}{after}", encoding="utf-8")
    return 0


def _named(word: str) -> tuple[str, Path]:
    name, sign, folder = word.rpartition("=")
    path = Path(folder).resolve()
    return (name if sign else path.name), path


def count(name: str, checkout: Path) -> Counted:
    """Examine every command in the scripts of a checkout.

    Raises:
        ConfigError: the folder holds no scripts that start programs of verl.
    """
    scripts, commands = 0, []
    with tempfile.TemporaryDirectory() as folder:
        placeholders = Placeholders(Path(folder))
        for script in sorted(path for part in _FOLDERS for path in (checkout / part).glob("**/*.sh")):
            script_commands = _read(script, checkout, folder).commands
            scripts += bool(script_commands)
            commands += [examine(command, placeholders) for command in script_commands]
    if not commands:
        raise ConfigError(f"{checkout}: no script in {', '.join(_FOLDERS)} starts a program of verl")
    return Counted(name, scripts, commands)


def _read(script: Path, checkout: Path, home: str) -> ScriptReading:
    """The commands of a script; variables and arguments that it insists on get a placeholder."""
    words = ["8", f"{home}/save"] if "$# -lt" in script.read_text(errors="replace").replace('"', "") else []
    environment = {"HOME": home}
    while True:
        reading = read_script(script, words, environment, checkout)
        last = reading.errors.strip().rpartition("\n")[2] if reading.status else ""
        unset = _UNSET.search(last)
        if reading.commands or unset is None or unset[1] in environment:
            return reading
        environment[unset[1]] = "1"


def tables(checkouts: list[Counted]) -> str:
    """Two tables in Markdown: what runs of each checkout, and the reasons why the rest does not."""
    lines = [
        "| checkout | scripts | commands | can run | of these fine-tuning | can run |",
        "|---|---|---|---|---|---|",
        *(checkout.row() for checkout in checkouts),
        "",
        "| reason why a command cannot run | commands | its only reason |",
        "|---|---|---|",
    ]
    every, only = Counter[str](), Counter[str]()
    for command in (command for checkout in checkouts for command in checkout.commands):
        reasons = {reason(fault) for fault in command.faults}
        every.update(reasons)
        only.update(reasons if len(reasons) == 1 else ())
    for text, number in sorted(every.items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"| {text.replace('|', ' ')} | {number} | {only[text]} |")
    return "\n".join(lines)


def _each(checkouts: list[Counted]) -> list[str]:
    return [
        f"{'runs' if not command.faults else 'not'}: {command.command.module}"
        + "".join(f"\n    {fault}" for fault in command.faults)
        for checkout in checkouts
        for command in checkout.commands
    ]


def reason(fault: str) -> str:
    """A fault without the keys and values of one command, to be counted."""
    if "not supported yet: " in fault:
        return fault.split("not supported yet: ")[1].split(". ")[0]
    fault = re.sub(r" \([^()]*(command line|, line \d+)\)", "", fault)
    if "this build does not support it yet" in fault:
        return f"`{fault.split(':')[0]}` is not supported yet"
    if "unknown key" in fault:
        return "a key that verl's settings do not have either"
    if fault.startswith("verl."):
        return f"{fault.split(': ')[1].split('. ')[0]} (`{fault.split(':')[0]}`)"
    if "no such folder" in fault or re.match(r"--config-name \S+: .* has no ", fault):
        return "its configuration file is not in the checkout"
    return "a value that is empty, or that the key does not take"
