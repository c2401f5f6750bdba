"""Questions and answers in compressed CSV files train as they are, and a resumed run finds rows that were in memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

from e2e_tools import Job, records

from hybridrl.data import save_rows
from hybridrl.observe.events import read_events

REWARD = """
def compute_score(solution_str, ground_truth, question, level, tag=None):
    assert ground_truth == "0" + question[-1], (ground_truth, question)  # CSV values stay text
    assert level in ("easy", "hard") and tag is None
    return {"score": float(len(solution_str) % 2), "is_easy": level == "easy"}
"""


def rows(count: int) -> list[dict[str, str]]:
    return [{"question": f"Sort: 4{n}", "answer": f"0{n}", "level": "easy" if n % 2 else "hard"} for n in range(count)]


def settings(sort_run: list[str], folder: Path, reward: Path) -> list[str]:
    return [
        *(word for word in sort_run if not word.startswith(("data.train_files", "data.val_files", "data.train_batch"))),
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.prompt_key=question",
        "data.ground_truth_key=answer",
        "data.system_prompt=Be brief.",
        f"reward.custom_reward_function.path={reward}",
        f"trainer.default_local_dir={folder}",
        "trainer.dump_freq=1",
        "trainer.save_freq=1",
    ]


def test_questions_and_answers_train_as_they_are(
    start: Callable[..., Job], sort_run: list[str], tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    for number, part in enumerate((rows(8)[:5], rows(8)[5:])):
        text = "question,answer,level\n" + "".join(f"{','.join(row.values())}\n" for row in part)
        (tmp_path / f"part{number}.csv.gz").write_bytes(gzip.compress(text.encode()))
    words = settings(sort_run, tmp_path / "run", reward)
    job = start(*words, f"data.train_files={tmp_path}/part*.csv.gz", "trainer.total_training_steps=2")
    assert job.wait() == 0, job.output[-4000:]
    assert "no ground truth" not in job.output
    dumped = [json.loads(line) for line in (tmp_path / "run/rollouts/1.jsonl").read_text().splitlines()]
    assert len(dumped) == 8
    for row in dumped:
        assert row["input"].startswith("system\nBe brief.") and row["gts"] == "0" + row["input"].split("Sort: 4")[1][0]
    steps = [record for record in records(tmp_path / "run") if "prompt_length/mean" in record]
    assert len(steps) == 2
    assert steps[0]["prompt_length/max"] < 512 and steps[0]["prompt_length/clip_ratio"] == 0
    kinds = [event["kind"] for event in read_events(tmp_path / "run")]
    assert kinds.count("start") == 1 and kinds.count("end") == 1


def test_rows_in_memory_are_found_again_by_a_resumed_run(
    start: Callable[..., Job], sort_run: list[str], tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    words = settings(sort_run, tmp_path / "run", reward)
    for steps in (1, 3):  # two processes that are given the same rows
        file = save_rows(rows(8), tmp_path / "run" / "data")
        job = start(*words, f"data.train_files={file}", f"trainer.total_training_steps={steps}")
        assert job.wait() == 0, job.output[-4000:]
    assert "resumed from" in job.output
    assert [record["training/global_step"] for record in records(tmp_path / "run")] == [1, 2, 3]
    other = save_rows(rows(9), tmp_path / "run" / "data")
    job = start(*words, f"data.train_files={other}", "trainer.total_training_steps=4")
    assert job.wait() == 2 and "data.train_files" in job.output and "another experiment" in job.output
