"""The commands of docs/agents.md, docs/environments.md and docs/observe.md, and the snippets of docs/sandbox.md, run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from snippets import run_snippets


@pytest.mark.slow
def test_the_runs_of_the_page(tmp_path: Path, finish: Callable[..., Any], forked: str) -> None:
    run_snippets("docs/agents.md", tmp_path, finish, "run", python=forked)
    for name, turns in (("run", 2), ("run_asks", 4)):
        rows = [json.loads(line) for line in (tmp_path / "tools" / name / "metrics.jsonl").read_text().splitlines()]
        (step,) = [row for row in rows if "num_turns/mean" in row]
        assert step["num_turns/min"] >= turns and step["agent_loop/sessions_failed"] == 0
        assert step["rollout_corr/kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_the_run_on_an_environment(tmp_path: Path, finish: Callable[..., Any], forked: str) -> None:
    run_snippets("docs/environments.md", tmp_path, finish, "run", python=forked)
    rows = [json.loads(line) for line in (tmp_path / "play" / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [row for row in rows if "num_turns/mean" in row]
    assert step["num_turns/max"] > 3 and step["agent_loop/sessions_failed"] == 0
    assert step["rollout_corr/kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_the_run_with_traces(tmp_path: Path, finish: Callable[..., Any], forked: str) -> None:
    run_snippets("docs/observe.md", tmp_path, finish, "run", python=forked)
    lines = (tmp_path / "tracing" / "run" / "traces.txt").read_text().splitlines()
    facts = [json.loads(line)[0] for line in lines]
    assert [(one["step"], one["validate"]) for one in facts] == [(1, False)] * 8
    assert len({(one["uid"], one["sample"]) for one in facts}) == 8


def test_the_snippets_of_the_sandbox(tmp_path: Path, finish: Callable[..., Any]) -> None:
    run_snippets("docs/sandbox.md", tmp_path, finish, "run")


def test_the_snippets_about_measuring_rewards(tmp_path: Path, finish: Callable[..., Any]) -> None:
    (measured,) = run_snippets("docs/reward.md", tmp_path, finish, "run")
    assert "disagree on 1 samples" in measured
