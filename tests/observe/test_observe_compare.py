"""`hybridrl compare`: pairs of prompts, intervals and p-values against independent counts."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import UserError
from hybridrl.observe import compare as module
from hybridrl.observe.compare import PairedComparison, compare, interval, read_validation, sign_change_probability
from hybridrl.observe.compare_command import main
from hybridrl.observe.dump import dump_generations
from hybridrl.observe.run_folder import BEST


def run(
    folder: Path,
    scores: Sequence[Sequence[float]],
    step: int = 4,
    prefix: str = "",
    sources: Sequence[str] | None = None,
    first_row: int = 0,
    **columns: Any,
) -> Path:
    """Write a run's folder with one validation: `scores[i]` are those of the samples of prompt i."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text('{"step":0,"x":1}\n')
    rows = [(first_row + number, score) for number, samples in enumerate(scores) for score in samples]
    texts = [f"{prefix}prompt {number}" for number, _ in rows]
    extra: dict[str, Any] = {"uid": [f"0-{number}" for number, _ in rows], **columns}
    extra["data_source"] = [sources[number - first_row] if sources else "sort" for number, _ in rows]
    values = [score for _, score in rows]
    truths = [str(number) for number, _ in rows]
    dump_generations(folder / "validation", step, texts, texts, values, truths, extra)
    return folder


def compared(first: Path, second: Path, **more: Any) -> list[PairedComparison]:
    return compare(read_validation(first, **more), read_validation(second, **more))


def test_means_of_prompts_are_compared(tmp_path: Path) -> None:
    """Numbers of samples may differ; the order of the files does not count."""
    first = run(tmp_path / "a", [[1, 0], [0, 0], [1, 1]])
    second = run(tmp_path / "b", [[1], [1], [0]])
    (result,) = compared(first, second)
    assert (result.prompts, result.better, result.worse) == (3, 2, 1)
    assert result.first == pytest.approx(0.5) and result.second == pytest.approx(2 / 3)
    assert result.difference == pytest.approx((0.5 + 1.0 - 1.0) / 3)
    lines = (second / "validation" / "4.jsonl").read_text().splitlines()
    (second / "validation" / "4.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    assert compared(first, second) == [result]


def test_only_prompts_that_both_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(tmp_path / "a", [[1], [0], [1], [0]])
    second = run(tmp_path / "b", [[1], [1]], first_row=2)
    (result,) = compared(first, second)
    assert (result.prompts, result.first, result.second) == (2, 0.5, 1.0)
    assert main([str(first), str(second)]) == 0
    assert "2 of 4 and of 2" in capsys.readouterr().out
    with pytest.raises(UserError, match="share no validation prompt"):
        compared(first, run(tmp_path / "c", [[1]], first_row=9))


def test_other_templates_are_paired_by_row_and_ground_truth(tmp_path: Path) -> None:
    first, second = run(tmp_path / "a", [[1], [0]]), run(tmp_path / "b", [[0], [0]], prefix="<user> ")
    assert compared(first, second)[0].worse == 1
    rows = [json.loads(line) for line in (second / "validation" / "4.jsonl").read_text().splitlines()]
    other = [{**row, "gts": "something else"} for row in rows]
    (second / "validation" / "4.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    with pytest.raises(UserError, match="share no validation prompt"):
        compared(first, second)


def test_a_prompt_that_occurs_twice_is_paired_in_the_order_of_the_files(tmp_path: Path) -> None:
    first, second = run(tmp_path / "a", [[1], [0]]), run(tmp_path / "b", [[1], [0]])
    for folder in (first, second):
        file = folder / "validation" / "4.jsonl"
        file.write_text(file.read_text().replace("prompt 1", "prompt 0"))
    (result,) = compared(first, second)
    assert (result.prompts, result.better, result.worse) == (2, 0, 0)


def test_sources_and_all_of_them(tmp_path: Path) -> None:
    sources = ["x", "x", "y"]
    first = run(tmp_path / "a", [[0], [0], [1]], sources=sources)
    second = run(tmp_path / "b", [[1], [0], [1]], sources=sources)
    assert [(each.source, each.prompts, each.difference) for each in compared(first, second)] == [
        ("x", 2, 0.5),
        ("y", 1, 0.0),
        ("", 3, pytest.approx(1 / 3)),
    ]


def test_metrics_and_steps(tmp_path: Path) -> None:
    """`acc` where it is there; a column by name; samples without a score are in no mean; the best step."""
    first = run(tmp_path / "a", [[5.0], [7.0]], acc=[1, 0], size=[3, None], word=["a", "b"])
    assert [prompt.values for prompt in read_validation(first).prompts] == [(1.0,), (0.0,)]
    assert [prompt.values for prompt in read_validation(first, metric="score").prompts] == [(5.0,), (7.0,)]
    assert [prompt.values for prompt in read_validation(first, metric="size").prompts] == [(3.0,)]
    with pytest.raises(UserError, match=r"nothing.*acc, score"):
        read_validation(first, metric="nothing")
    run(first, [[9.0], [9.0]], step=8)
    assert read_validation(first).step == 8 and read_validation(first, "4").step == 4
    with pytest.raises(UserError, match="best_metric"):
        read_validation(first, "best")
    (first / BEST).write_text('{"step": 4}')
    assert read_validation(first, "best").step == 4
    for step in ("5", "newest"):
        with pytest.raises(UserError, match=step):
            read_validation(first, step)
    with pytest.raises(UserError, match="--metric"):
        compare(read_validation(first, "4"), read_validation(first, "8"))


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    """NaN is no score; a text is named, also where every sample has one."""
    first = run(tmp_path / "a", [[1.0, math.nan], [math.nan]], word=["a", "b", "c"])
    assert [prompt.values for prompt in read_validation(first).prompts] == [(1.0,)]
    with pytest.raises(UserError, match=r"'word' is no number.*score"):
        read_validation(first, metric="word")


@pytest.mark.parametrize("p", [0.5, 0.52])
def test_many_prompts_are_as_draws_of_them_would_be(monkeypatch: pytest.MonkeyPatch, p: float) -> None:
    differences = np.random.default_rng(1).choice([1.0, 0.0, -1.0], p=[p / 4, 0.75, (1 - p) / 4], size=5_000)
    bounds, probability = interval(differences), sign_change_probability(differences)
    monkeypatch.setattr(module, "_MANY", 10**9)
    low, high = interval(differences)
    assert np.allclose(bounds, (low, high), atol=0.04 * (high - low))
    drawn = sign_change_probability(differences)
    assert abs(probability - drawn) < 4 * math.sqrt(drawn * (1 - drawn) / 10_000) + 0.01
    assert sign_change_probability(np.zeros(6_000)) == 1.0


def test_a_run_without_validation_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(tmp_path / "a", [[1]])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text('{"step":1,"val/loss":1}\n')
    assert main([str(first), str(tmp_path / "b")]) == 2
    assert "has no validation samples" in capsys.readouterr().err


def test_the_printed_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run(tmp_path / "a", [[0], [0], [1]]), run(tmp_path / "b", [[1], [1], [1]])
    for folder, rate in ((first, 1e-6), (second, 2e-6)):
        config = {
            "actor_rollout_ref": {"actor": {"optim": {"lr": rate}}},
            "trainer": {"default_local_dir": str(folder)},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert main([str(first), str(second)]) == 0
    text = capsys.readouterr().out
    assert "+0.6667" in text and "actor_rollout_ref.actor.optim.lr: 1e-06 -> 2e-06" in text
    assert "default_local_dir" not in text and "3 prompts are few" in text
    assert main([str(first), str(second), "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["sources"][0]["difference"] == pytest.approx(2 / 3)
    assert record["settings"] == {"actor_rollout_ref.actor.optim.lr": [1e-6, 2e-6]}
    with pytest.raises(SystemExit):
        main([str(first)])


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
@settings(max_examples=40, deadline=None)
def test_p_is_the_share_of_sign_changes(values: list[int]) -> None:
    changes = list(itertools.product((-1, 1), repeat=len(values)))
    extreme = sum(abs(sum(s * v for s, v in zip(signs, values, strict=True))) >= abs(sum(values)) for signs in changes)
    assert sign_change_probability(np.asarray(values, dtype=float)) == pytest.approx(extreme / len(changes))


def test_p_of_many_prompts_is_that_of_the_sign_test() -> None:
    """Differences of one size: the sum is a binomial number. 10,000 draws are within 4 standard deviations."""
    for better, count in ((20, 30), (18, 30), (110, 200)):
        differences = np.repeat([1.0, -1.0], [better, count - better])
        tail = sum(math.comb(count, k) for k in range(better, count + 1)) / 2**count
        exact = min(1.0, 2 * tail)
        assert abs(sign_change_probability(differences) - exact) < 4 * math.sqrt(exact * (1 - exact) / 10_000) + 1e-4


def test_the_interval_is_that_of_normal_theory_for_many_prompts() -> None:
    differences = np.random.default_rng(3).normal(0.1, 1.0, size=2_000)
    low, high = interval(differences)
    error = 1.96 * statistics.stdev(differences.tolist()) / math.sqrt(len(differences))
    assert low == pytest.approx(differences.mean() - error, abs=0.06 * error)
    assert high == pytest.approx(differences.mean() + error, abs=0.06 * error)
    assert interval(np.full(7, 0.25)) == (0.25, 0.25)


def test_intervals_hold_the_true_difference_as_often_as_they_say() -> None:
    """Accuracies of paired prompts with a known difference: 95 % of 300 intervals, within 4 standard deviations."""
    generator, inside = np.random.default_rng(0), 0
    for number in range(300):
        difficulty = generator.uniform(size=100)
        first = (generator.uniform(size=100) < difficulty * 0.8).astype(float)
        second = (generator.uniform(size=100) < difficulty * 0.8 + 0.1).astype(float)
        low, high = interval(second - first, seed=number)
        inside += low <= 0.1 <= high
    assert abs(inside / 300 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 300)
