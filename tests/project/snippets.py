"""Snippets of README.md and of the pages for beginners. The word after a fence's language says how one is checked:

`run` is run, in one folder per page and in order; `file` is written to the path in its first line; `compose` needs a
hub or a GPU, so its settings are composed and its modules found; `install` and `quickstart` call scripts, whose
arguments are checked; `after_quickstart` is run in the folder of a quickstart that has just ended. Output is `text`.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/quickstart.md",
    "docs/first_reward.md",
    "docs/first_data.md",
    "docs/agents.md",
    "docs/agents_tutorial.md",
    "docs/environments.md",
    "docs/experiment.md",
    "docs/gateway.md",
    "docs/missing.md",
    "docs/sandbox.md",
    "docs/vision.md",
    "docs/observe.md",
)
CHECKS = ("run", "file", "compose", "install", "quickstart", "after_quickstart")
FENCE = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Snippet:
    """One fenced block of a page."""

    language: str
    check: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of a shell snippet."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def snippets(page: str, *checks: str) -> list[Snippet]:
    """The snippets of a page in their order; with `checks`, those that are checked in one of these ways."""
    found = [Snippet(*match.groups()) for match in FENCE.finditer((REPOSITORY / page).read_text())]
    return [snippet for snippet in found if not checks or snippet.check in checks]


def run_snippets(
    page: str,
    folder: Path,
    finish: Callable[..., Any],
    *checks: str,
    python: str = sys.executable,
    instead: Mapping[str, str] | None = None,
) -> list[str]:
    """Run a page's snippets of these kinds in a folder, write its files, and return what each command printed.

    Args:
        instead: text of the page -> what takes its place, to make runs shorter.
    """
    folders = [str(Path(one).parent) for one in (python, sys.executable)]
    environment = os.environ | {"PATH": os.pathsep.join([*folders, os.environ["PATH"]])}
    outputs, found = [], snippets(page, "file", *checks)
    gone = [text for text in instead or {} if not any(text in snippet.text for snippet in found)]
    assert not gone, f"{page} has no {gone}"
    for number, snippet in enumerate(found):
        for text, other in (instead or {}).items():
            snippet.text = snippet.text.replace(text, other)
        if snippet.check == "file":
            path = folder / snippet.text.splitlines()[0].removeprefix("# ")
            path.parent.mkdir(exist_ok=True)
            path.write_text(snippet.text)
            continue
        if snippet.language == "python":
            (folder / f"snippet{number}.py").write_text(snippet.text)
            command = [python, f"snippet{number}.py"]
        else:
            command = ["bash", "-euc", snippet.text]
        ended = finish(command, cwd=folder, env=environment)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        outputs.append(ended.stdout)
    return outputs
