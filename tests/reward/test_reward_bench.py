"""The measuring of reward functions, as a program."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.reward.bench import correlation, disagreements, distribution, main, quantile

NUMBERS = st.floats(-100, 100, width=32)


@given(st.lists(NUMBERS, min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_those_of_numpy(values, share):
    assert quantile(values, share) == pytest.approx(np.quantile(values, share), abs=1e-6)


@given(st.lists(NUMBERS, min_size=1, max_size=60))
def test_a_distribution_counts_every_value_once(values):
    found = distribution(values)
    assert sum(found.counts.values()) == found.count == len(values)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-4) and found.std == pytest.approx(
        np.std(values), abs=1e-4
    )


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=3, max_size=30), st.floats(0.5, 4), NUMBERS)
def test_another_scale_is_no_disagreement(pairs, factor, shift):
    one, other = map(list, zip(*pairs, strict=True))
    moved = [factor * value + shift for value in one]
    assert disagreements(one, moved, 1e-3) == []
    assert disagreements(one, other, 0.01) == disagreements(other, one, 0.01)
    expected = np.corrcoef(one, other)[0, 1] if np.std(one) > 1e-2 and np.std(other) > 1e-2 else None
    if expected is not None:
        assert correlation(one, other) == pytest.approx(expected, abs=1e-3)


def test_a_score_that_only_one_has_is_a_disagreement():
    assert disagreements([1.0, None, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0], 0.1) == [2, 3, 1]
    assert correlation([1.0, None], [1.0, 1.0]) is None


ROWS = [
    {"input": "2 + 2?", "output": "4", "gts": "4", "score": 1.0},
    {"prompt": "3 + 3?", "response": "it is 6", "reward_model": {"ground_truth": "6"}, "score": 0.0},
    {"prompt": "1 / 0?", "responses": ["raise", "hang"], "ground_truth": "none"},
    {"output": "sometimes", "ground_truth": "x"},
]
FUNCTIONS = """
import pathlib, time

def exact(solution_str, ground_truth):
    if solution_str == "raise":
        raise ZeroDivisionError("no answer")
    if solution_str == "hang":
        time.sleep(60)
    if solution_str == "sometimes":
        mark = pathlib.Path(__file__).with_name("mark")
        mark.write_text(mark.read_text() + "x" if mark.exists() else "x")
        return len(mark.read_text())
    return float(solution_str == ground_truth)

def lenient(solution_str, ground_truth):
    return 2.0 if ground_truth in solution_str else -2.0
"""


@pytest.fixture
def files(tmp_path, user_file):
    rows = tmp_path / "rollouts.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return rows, user_file(FUNCTIONS)


def test_two_functions_are_measured_and_compared(files, tmp_path):
    rows, path = files
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "hybridrl", "reward-bench", rows, "--function", f"{path}:exact"]
    command += ["--function", f"{path}:lenient", "--timeout", "1", "--workers", "1", "--json", out]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    exact, lenient = found["functions"].values()
    assert found["samples"] == 5 and exact["unscored"] == {"grading": 1, "timeout": 1}
    assert (exact["exceptions"], exact["timeouts"], exact["runs_disagree"]) == (1, 1, 1)
    assert exact["changed"][0]["scores"] == [1.0, 2.0] and exact["changed"][0]["place"].endswith(":4")
    assert exact["scores"]["counts"] == {"0": 1, "1": 2} and exact["latency_s"]["max"] >= 1.0
    assert lenient["scores"]["counts"] == {"-2": 3, "2": 2} and lenient["runs_disagree"] == 0
    by_names = {tuple(name.rpartition(":")[2] for name in pair["functions"]): pair for pair in found["pairs"]}
    assert [row["place"].rpartition(":")[2] for row in by_names["exact", "lenient"]["examples"]] == ["2", "4", "3", "3"]
    assert by_names["exact", "the file"]["disagree"] == 1  # one line that both scored has no other score
    for word in ("ZeroDivisionError: no answer", "disagree on 4 samples", "1 samples with another score", "p95"):
        assert word in done.stdout


def test_built_in_scorers_are_the_default(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"output": "#### 4", "ground_truth": "4", "data_source": "openai/gsm8k"}))
    assert main([str(rows), "--runs", "1", "--workers", "1"]) == 0
    assert "mean 1 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words", "error"),
    [
        ("{", [], "rows.jsonl:1: it is no JSON"),
        ('{"text": "x"}', [], "one of solution_str"),
        ('{"output": 3}', [], "must be text"),
        ("", [], "has no lines"),
        ('{"output": "x"}', ["--kwargs", "[]"], "JSON object"),
        ('{"output": "x"}', ["--function", "missing.py"], "missing.py"),
    ],
)
def test_what_is_wrong_is_one_message(tmp_path, capsys, text, words, error):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(text)
    assert main([str(rows), *words]) == 2
    assert error in capsys.readouterr().err
