"""Several reward functions in whole runs, and what a run leaves behind if one of them fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from e2e_tools import Job, records

from hybridrl.protocol import DataProto

REWARD = """
from pathlib import Path

def fails(completions, **columns):
    found = [len(completion[0]["content"]) % 3 for completion in completions]
    calls = Path({folder!r}) / "calls"
    number = len(calls.read_text()) + 1 if calls.exists() else 1
    calls.write_text("x" * number)
    if number == {at} and not (Path({folder!r}) / "fixed").exists():
        {fault}
    return found

def length(solution_str, ground_truth):
    return {{"score": len(solution_str), "short": len(solution_str) < 4}}
"""


def command(sort_run: list[str], folder: Path, fault: str, run: str, *words: str, at: int = 2) -> list[str]:
    """A run of three steps whose first function fails in call `at`; each step calls it once."""
    (folder / "reward.py").write_text(REWARD.format(folder=str(folder), fault=fault, at=at))
    return [
        *sort_run,
        f"reward.functions.fails={{path: {folder / 'reward.py'}, weight: 2}}",
        f"reward.functions.length={{path: {folder / 'reward.py'}, weight: -0.25}}",
        "reward.num_workers=1",
        "trainer.total_training_steps=3",
        "trainer.rollout_data_dir=" + str(folder / f"{run}_samples"),
        "trainer.val_before_train=False",
        f"trainer.default_local_dir={folder / run}",
        *words,
    ]


def steps(folder: Path) -> list[dict]:
    return [record for record in records(folder) if "critic/score/mean" in record]


def test_an_error_leaves_the_last_step_and_the_batch_and_a_resumed_run_repeats_the_prompts(
    start: Callable[..., Job], start_with_ray: Callable[..., Job], sort_run: list[str], tmp_path: Path
) -> None:
    words = command(sort_run, tmp_path, "raise ValueError('not yet')", "run", "trainer.save_freq=-1")
    job = start(*words)
    assert job.wait() == 2, job.output[-4000:]
    run = tmp_path / "run"
    for part in ("fails in ", "ValueError: not yet", str(run / "failed_batch_step_2"), str(run / "global_step_1")):
        assert part in job.output
    failed = DataProto.load_from_disk(run / "failed_batch_step_2")
    assert "token_level_scores" not in failed.batch.keys()
    (tmp_path / "fixed").touch()
    again = start(*words)
    assert again.wait() == 0, again.output[-4000:]
    first, second, third = steps(run)
    for record in (first, second, third):
        parts = 2 * record["reward/fails/mean"] - 0.25 * record["reward/length/mean"]
        assert abs(record["critic/score/mean"] - parts) < 1e-5
        assert abs(record["reward/score/mean"] - parts) < 1e-5 and 0 <= record["reward/length/short/mean"] <= 1
    lines = [json.loads(line) for line in (tmp_path / "run_samples" / "2.jsonl").read_text().splitlines()]
    assert sorted(line["uid"] for line in lines) == sorted(map(str, failed.non_tensor_batch["uid"]))
    untouched = start_with_ray(*[word.replace(str(run), str(tmp_path / "whole")) for word in words])
    assert untouched.wait() == 0, untouched.output[-4000:]
    for expected, found in zip(steps(tmp_path / "whole"), (first, second, third), strict=True):
        assert found["critic/score/mean"] == expected["critic/score/mean"]
    reward = tmp_path / "reward.py"
    reward.write_text(reward.read_text().replace('{"score": len(solution_str)', '{"score": -len(solution_str)'))
    other = start(*words)
    assert other.wait() == 2, other.output[-4000:]
    assert "as another experiment: content of reward.functions was" in " ".join(other.output.split())
    assert "nothing was trained" not in other.output


def test_a_validation_that_fails_is_repeated_by_a_resumed_run(
    start: Callable[..., Job], sort_run: list[str], tmp_path: Path
) -> None:
    """Also after the last step, where nothing is left to train."""
    fault = "raise ValueError('not yet')"
    words = command(sort_run, tmp_path, fault, "run", "trainer.save_freq=-1", "trainer.test_freq=3", at=4)
    job = start(*words)
    assert job.wait() == 2 and "ValueError: not yet" in job.output, job.output[-4000:]
    run = tmp_path / "run"
    assert (run / "global_step_3").is_dir()

    def validations() -> list[int]:
        return [record["step"] for record in records(run) if any(name.startswith("val-") for name in record)]

    assert validations() == []
    (tmp_path / "fixed").touch()
    again = start(*words)
    assert again.wait() == 0, again.output[-4000:]
    assert validations() == [3]


def test_samples_that_fail_are_left_out_of_training(
    start: Callable[..., Job], sort_run: list[str], tmp_path: Path
) -> None:
    """In the second step three samples have no score."""
    words = command(
        sort_run,
        tmp_path,
        "found[0:12:4] = ['no number'] * 3",  # one of four samples of three prompts
        "run",
        "actor_rollout_ref.rollout.n=4",
        "reward.on_error=drop",
        "reward.max_error_rate=0.05",
    )
    job = start(*words)
    assert job.wait() == 0, job.output[-4000:]
    first, second, third = steps(tmp_path / "run")
    assert [record["reward/errors"] for record in (first, second, third)] == [0, 3, 0]
    count = [len((tmp_path / "run_samples" / f"{step}.jsonl").read_text().splitlines()) for step in (1, 2, 3)]
    assert count[0] == count[2] == count[1] + 3
    assert "3 of" in job.output and "'no number'" in job.output
