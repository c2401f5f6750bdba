"""`hybridrl import PROJECT SCRIPT`: reports what becomes of each setting of a script, with the command to paste.

No program of the script is started.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hybridrl.errors import ConfigError
from hybridrl.registry import IMPORTED_PROJECTS

_USAGE = """usage: hybridrl import PROJECT SCRIPT [ARGUMENTS]
       hybridrl import PROJECT -- COMMAND LINE

Reports for each setting of a script for another library whether it is mapped, without effect or refused here, and
prints the command to paste. Defaults of the other library that differ from those here are set in the command, so that
it is the same run. No program of the script is started: Python and TOML files are read, and the shell code of a shell
script runs in bash without its programs (its redirections take place).

The exit status is 0 if every setting has a meaning here, otherwise 2.

projects:
{projects}
  FILE.py:NAME  a function of your own: from the script and its arguments it returns a list of RunReport
                (docs/coming_from.md)

Shell scripts for verl: python -m hybridrl.verl_compat."""


def usage() -> str:
    """The text of `--help`."""
    names = IMPORTED_PROJECTS.names()
    return _USAGE.format(projects="\n".join(f"  {name:12}  {IMPORTED_PROJECTS.metadata(name).reads}" for name in names))


def main(words: Sequence[str], *, command: str = "hybridrl import") -> int:
    """Print the report; return 0 if the script can run here, 2 if not.

    Args:
        words: the words after the command.
        command: how the user called it.
    """
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    try:
        if not IMPORTED_PROJECTS.knows(words[0]) or len(words) < 2 or words[1:] == ["--"]:
            names = ", ".join(IMPORTED_PROJECTS.names())
            raise ConfigError(f"{command} {' '.join(words)}: give one of {names}, and a script; {command} --help")
        reports = IMPORTED_PROJECTS.get(words[0])(list(words[1:]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for report in reports:
        report.notes += [f"to set in the command: {fault}" for fault in report.faults()]
    print("\n\n".join(report.text() for report in reports))
    return 0 if all(report.can_run for report in reports) else 2
