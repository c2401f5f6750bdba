"""What mkdocs.yml asks of the pages: they are written for a reader of the repository and for the site alike."""

from __future__ import annotations

import re
from typing import Any

# "```bash run": the second word says how a test checks the snippet; the site's highlighter knows only the first.
FENCE = re.compile(r"^(```\w+) \w+$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page without the words that only tests read."""
    return FENCE.sub(r"\1", markdown)
