"""`hybridrl import trl SCRIPT`: reports what becomes of each setting of a script, with the command to paste.

The script is read, and never run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hybridrl.compat.trl.script import report
from hybridrl.errors import ConfigError

USAGE = """usage: hybridrl import trl SCRIPT.py

Reports for each setting of a script that uses TRL's trainers whether it is mapped, without effect or refused here, and
prints the command to paste. The script is read and not run. Shell scripts for verl: python -m hybridrl.verl_compat."""


def main(words: Sequence[str], *, command: str = "hybridrl import") -> int:
    """Print the report; return 0 if the script can run here, 2 if not.

    Args:
        words: the words after the command.
        command: how the user called it.
    """
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    if words[0] != "trl" or len(words) != 2:
        print(f"error: {command} {' '.join(words)}: give trl and one script\n{USAGE}", file=sys.stderr)
        return 2
    try:
        text, can_run = report(Path(words[1]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0 if can_run else 2
