"""A run is repeated from the `config.yaml` in its folder, from anywhere, and gives the same numbers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from e2e_tools import Job, records, without_timing

Start = Callable[..., Job]

REWARD = """
import os
from common import limit

WORDS = open(os.path.join(os.path.dirname(__file__), "words.txt")).read()


def compute_score(solution_str, **others):
    return min(sum(character in WORDS for character in solution_str), limit()) / 8
"""
FIRST = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.model.path=models/tiny",
    "actor_rollout_ref.model.external_lib=my_lib",
    "data.train_files=rows/t*.parquet",
    "data.train_batch_size=16",
    "data.max_response_length=6",
    "reward.custom_reward_function.path=code/reward.py",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "trainer.report=False",
    "trainer.total_training_steps=2",
    "trainer.default_local_dir=runs/a",
]


@pytest.fixture
def place(tmp_path: Path, micro_model: Path, sort_data: Path) -> Path:
    """A folder in which a user works: with a model, data, code, and a module that settings name."""
    folder = tmp_path / "first"
    (folder / "code").mkdir(parents=True)
    (folder / "rows").mkdir()
    shutil.copytree(micro_model, folder / "models/tiny")
    shutil.copy(sort_data / "train.parquet", folder / "rows/train.parquet")
    (folder / "code/reward.py").write_text(REWARD)
    (folder / "code/words.txt").write_text("123")
    (folder / "code/common.py").write_text("def limit():\n    return 8\n")
    (folder / "my_lib.py").write_text("")
    (tmp_path / "second").mkdir()
    return tmp_path


def notices(job: Job) -> list[str]:
    return [
        line for line in job.output.splitlines() if line.startswith(("notice:", "warning:")) and "finished" not in line
    ]


@pytest.mark.slow
def test_a_run_is_repeated_elsewhere_and_resumed_in_place(start: Start, place: Path) -> None:
    first, second = place / "first", place / "second"
    job = start(*FIRST, folder=first)
    assert job.wait() == 0, job.output[-4000:]
    before = {file for file in first.rglob("*") if "__pycache__" not in file.parts}
    config = os.path.relpath(first / "runs/a/config.yaml", second)
    again = start("--config", config, "trainer.default_local_dir=runs/b", folder=second)
    assert again.wait() == 0, again.output[-4000:]
    expected = [without_timing(record) for record in records(first / "runs/a")]
    assert len(expected) == 2 and [without_timing(record) for record in records(second / "runs/b")] == expected
    assert {file for file in first.rglob("*") if "__pycache__" not in file.parts} == before, "nothing is written there"
    assert f"modules are searched in {first}, too" in again.output and "has no effect" not in again.output
    assert len(notices(again)) == len(notices(job)) + 1, (notices(job), notices(again))

    more = start(*FIRST, "trainer.total_training_steps=3", folder=first)
    assert more.wait() == 0, more.output[-4000:]
    assert "resumed from" in more.output and "other settings: trainer.total_training_steps was 2, now 3" in more.output
    assert [record["step"] for record in records(first / "runs/a")] == [1, 2, 3]

    written = yaml.safe_load((second / "runs/b/config.yaml").read_text())
    assert written["trainer"]["default_local_dir"] == str(second / "runs/b")
    assert written["data"]["train_files"] == [str(first / "rows/t*.parquet")]
