"""Repeats a run from the `config.yaml` in its folder, wherever the command is given."""

import json
import os
import sys
from pathlib import Path

from hybridrl.notify import notify

#: files of a run's folder, and the entry of the second that says in which folder the run was started
CONFIG, VERSIONS, STARTED_IN = "config.yaml", "versions.json", "working_directory"


def search_modules_of(file: Path) -> None:
    """Search modules also where a run was started, if `file` is its `config.yaml`: settings may name modules of there.

    Paths in such a file are absolute.
    """
    if file.name != CONFIG:
        return
    try:
        folder = json.loads((file.parent / VERSIONS).read_text(encoding="utf-8"))[STARTED_IN]
    except (OSError, ValueError, KeyError, TypeError):  # a file of the user's own, or of an earlier version
        return
    if os.path.isdir(folder) and not any(os.path.samefile(folder, path or ".") for path in sys.path if _exists(path)):
        sys.path.append(folder)
        notify(f"modules are searched in {folder}, too, where the run of {file} was started")


def _exists(path: str) -> bool:
    return os.path.exists(path or ".")
