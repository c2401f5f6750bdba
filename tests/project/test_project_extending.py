"""The examples of docs/extending.md do what the page says, in whole runs on the tiny model."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LIMIT_S = 500


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(page: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's modules, in a folder to run from."""
    folder = tmp_path_factory.mktemp("extending")
    modules = dict(re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", page, re.DOTALL))
    assert sorted(modules) == ["my_engine.py", "my_manager.py", "my_methods.py", "my_training.py"]
    for name, source in modules.items():
        (folder / name).write_text(source)
    return folder


def words_of(page: str, part: str) -> list[str]:
    """The settings of the page's command that holds `part`."""
    (command,) = [text for text in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if part in text]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "hybridrl.trainer.main_ppo"] and words[3] == "..."
    return words[4:]


@pytest.fixture
def run(folder: Path, micro_model: Path, sort_data: Path, forked: str) -> Callable[[str, list[str]], list[dict]]:
    """Makes two training steps, in a folder of this name; the metrics of each."""
    return lambda name, words: trained(forked, folder, name, micro_model, sort_data, words)


def trained(python: str, folder: Path, name: str, model: Path, data: Path, words: list[str]) -> list[dict]:
    common = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={data / 'train.parquet'}",
        f"trainer.default_local_dir={folder / name}",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=8",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.seed=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.total_training_steps=2",
        "trainer.logger=[file]",
        "trainer.report=False",
    ]
    done = subprocess.run(
        [python, "-m", "hybridrl.trainer.main_ppo", *common, *words],
        cwd=folder, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_everything_of_the_page_in_one_run(page, folder, run) -> None:
    """Mini-batches of two micro-batches, so the counts of the loss are not those of its call."""
    commands = [words_of(page, name) for name in ("my_methods", "my_manager", "my_training", "my_engine")]
    words = [word for command in commands for word in command if "external_lib" not in word]
    words.append("actor_rollout_ref.model.external_lib='my_methods,my_manager'")
    records = run("own", words)
    assert [record["training/global_step"] for record in records] == [1, 2]
    for record in records:
        assert record["actor/square"] > 0  # in the second mini-batch of a step the policy is not the old one any more
        assert record["critic/advantages/max"] in (0.0, 0.5)  # a sign times my_coef
        assert record["actor/noise"] == pytest.approx(1e-5)
        # The engine's own log-probabilities, under the weights that it was sent, are the trainer's.
        assert record["rollout_corr/kl"] == pytest.approx(0, abs=1e-4)
        assert record["rollout/tokens_per_s"] > 0 and record["rollout/replicas"] == 1
    kept = (folder / "own" / "config.yaml").read_text()
    for line in ("my_beta: 0.2", "my_coef: 0.5", "noise: 1.0e-05", "pause_s: 0.001", "per_token: 0.001"):
        assert line in kept


def test_a_loss_written_for_verl_trains(page, run) -> None:
    words = [f"{word}_of_verl" if word.endswith("loss_mode=square") else word for word in words_of(page, "my_methods")]
    records = run("verl", [word for word in words if "my_beta" not in word])
    assert len(records) == 2 and all(record["actor/square"] > 0 for record in records)


def test_a_wrong_setting_of_ones_own_is_named_before_a_model_is_loaded(page, folder, micro_model, sort_data) -> None:
    words = [word.replace("my_beta=0.2", "my_bata=0.2") for word in words_of(page, "my_methods")]
    files = [f"actor_rollout_ref.model.path={micro_model}", f"data.train_files={sort_data / 'train.parquet'}"]
    done = subprocess.run(
        [sys.executable, "-m", "hybridrl.trainer.main_ppo", *files, *words],
        cwd=folder, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "policy_loss.my_bata" in done.stderr and "policy_loss.my_beta" in done.stderr
