"""Adjustments to the site of mkdocs.yml: pages are written for a reader of the repository and for the site alike."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# "```bash run": the second word says how a test checks the snippet; the site's highlighter knows only the first.
FENCE = re.compile(r"^(```\w+) \w+$", re.MULTILINE)
HEADING = re.compile(r"^(#{2,3}) (.+)$")
ROW = re.compile(r"^\| \[([^]]+)\]\(([^)#]+)\) \|")
OVERVIEW = "docs/README.md"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page without the words that only tests read."""
    return FENCE.sub(r"\1", markdown)


def on_config(config: Any, **_: Any) -> Any:
    """Put the sections of docs/README.md into the navigation, after its first entry."""
    overview = (Path(config["docs_dir"]) / OVERVIEW).read_text(encoding="utf-8")
    config["nav"] = with_sections(config["nav"], overview)
    return config


def with_sections(nav: Sequence[Any], overview: str) -> list[Any]:
    """Return the navigation with the sections of the overview after its first entry.

    Args:
        nav: entries as in mkdocs.yml. A page that they name is not repeated.
        overview: the text of docs/README.md. A second-level heading is a section, a third-level one a group within it,
            and each row of a table is a page. The overview itself is the first page of the first section.
    """
    named = set(_paths(nav))
    sections: list[dict[str, list[Any]]] = []
    pages: list[Any] = []
    for line in overview.splitlines():
        if heading := HEADING.match(line):
            pages = []
            entry = {heading[2]: pages}
            if heading[1] == "##":
                sections.append(entry)
            else:
                next(iter(sections[-1].values())).append(entry)
        elif row := ROW.match(line):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(OVERVIEW), row[2]))
            if path not in named:
                pages.append({row[1][:1].upper() + row[1][1:]: path})
    next(iter(sections[0].values())).insert(0, OVERVIEW)
    return [nav[0], *sections, *nav[1:]]


def _paths(node: Any) -> list[str]:
    """Return the pages that a part of the navigation names."""
    if isinstance(node, str):
        return [node]
    return [path for child in (node.values() if isinstance(node, dict) else node) for path in _paths(child)]
