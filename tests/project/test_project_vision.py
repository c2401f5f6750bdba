"""The first command of docs/vision.md runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from snippets import run_snippets


@pytest.mark.slow
def test_the_run_of_the_page(tmp_path: Path, finish: Callable[..., Any], joined: str) -> None:
    run_snippets("docs/vision.md", tmp_path, finish, "run", python=joined)
    rows = [json.loads(line) for line in (tmp_path / "demo" / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/grad_norm" in row]
    assert len(steps) == 4
    assert all(step["rollout_corr/kl"] == pytest.approx(0, abs=1e-5) for step in steps if "rollout_corr/kl" in step)
