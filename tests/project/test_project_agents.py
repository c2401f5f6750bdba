"""The commands of the pages about agents, docs/missing.md and docs/observe.md, and the snippets of docs/sandbox.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from snippets import run_snippets


@pytest.mark.slow
def test_the_runs_of_the_page(tmp_path: Path, finish: Callable[..., Any], joined: str) -> None:
    run_snippets("docs/agents.md", tmp_path, finish, "run", python=joined)
    for name, turns in (("run", 2), ("run_asks", 4)):
        rows = [json.loads(line) for line in (tmp_path / "tools" / name / "metrics.jsonl").read_text().splitlines()]
        (step,) = [row for row in rows if "num_turns/mean" in row]
        assert step["num_turns/min"] >= turns and step["agent_loop/sessions_failed"] == 0
        assert step["rollout_corr/kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_the_runs_of_the_tutorial(tmp_path: Path, finish: Callable[..., Any], joined: str) -> None:
    """As they stand there, with fewer steps and prompts."""
    shorter = {
        "=800": "=2",
        "_step_800/": "_step_2/",
        "total_training_steps=20": "total_training_steps=1",
        "test_freq=10": "test_freq=1",
        "--out tutorial/data": "--out tutorial/data --train-size 128 --test-size 4",
    }
    *_, shown = run_snippets("docs/agents_tutorial.md", tmp_path, finish, "run", python=joined, instead=shorter)
    assert shown.count("-> score 0.0") == 3
    rows = [json.loads(line) for line in (tmp_path / "tutorial" / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [row for row in rows if "tool_call_counts/mean" in row]
    assert step["agent_loop/sessions_failed"] == 0 and step["rollout_corr/kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_the_run_on_an_environment(tmp_path: Path, finish: Callable[..., Any], joined: str) -> None:
    run_snippets("docs/environments.md", tmp_path, finish, "run", python=joined)
    rows = [json.loads(line) for line in (tmp_path / "play" / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [row for row in rows if "num_turns/mean" in row]
    assert step["num_turns/max"] > 3 and step["agent_loop/sessions_failed"] == 0
    assert step["rollout_corr/kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_the_run_with_traces(tmp_path: Path, finish: Callable[..., Any], joined: str) -> None:
    run_snippets("docs/observe.md", tmp_path, finish, "run", python=joined)
    lines = (tmp_path / "tracing" / "run" / "traces.txt").read_text().splitlines()
    facts = [json.loads(line)[0] for line in lines]
    assert [(one["step"], one["validate"]) for one in facts] == [(1, False)] * 8
    assert len({(one["uid"], one["sample"]) for one in facts}) == 8


@pytest.mark.slow
def test_the_run_with_a_judge_that_is_gone(tmp_path: Path, finish: Callable[..., Any], joined: str) -> None:
    run_snippets("docs/missing.md", tmp_path, finish, "run", python=joined)
    rows = [json.loads(line) for line in (tmp_path / "judge" / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [row for row in rows if "missing/infra" in row]
    assert step["missing/infra"] == 4 / 18 and step["missing/refilled"] == 2 / 16 and step["missing/left_out"] == 2 / 16


def test_the_snippets_of_the_sandbox(tmp_path: Path, finish: Callable[..., Any]) -> None:
    run_snippets("docs/sandbox.md", tmp_path, finish, "run")


def test_the_snippets_about_measuring_rewards(tmp_path: Path, finish: Callable[..., Any]) -> None:
    (measured,) = run_snippets("docs/reward.md", tmp_path, finish, "run")
    assert "disagree on 1 samples" in measured
