"""The script that shows what learns: a run of two steps, its table and picture, nothing run twice; token rewards."""

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from hybridrl.config import load_config
from hybridrl.models.tiny import build_tokenizer
from hybridrl.protocol import DataProto
from hybridrl.reward import create_reward_manager


@pytest.fixture
def script(repository, ray_session, micro_model, tmp_path, monkeypatch) -> Callable[..., int]:
    """Calls the script; its runs join the Ray of the session and train the smallest model."""
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    monkeypatch.syspath_prepend(repository / "benchmarks")
    main = importlib.import_module("recipes_learn").main
    places = ["--out", str(tmp_path / "out"), "--page", str(tmp_path / "docs"), "--model", str(micro_model)]
    return lambda *words: main([*places, *words])


def rows_of(page: Path, section: str) -> list[list[str]]:
    text = page.read_text().split(f"<!-- {section} -->")[1].split(f"<!-- end of {section} -->")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.strip().splitlines()[2:]]


def test_two_steps_of_a_recipe_make_a_row_and_a_picture(script, repository, tmp_path, capsys) -> None:
    docs = {file: file.read_bytes() for file in (repository / "docs").glob("recipes_learn*")}
    words = ["--only", "gpg", "--seeds", "3", "--steps", "2"]
    assert script(*words) == 1 and "rose by less than 0.05: gpg" in capsys.readouterr().err
    (row,) = rows_of(tmp_path / "docs" / "recipes_learn.md", "recipes")
    assert row[0].startswith("[gpg]") and row[1:3] == ["3", "2"] and row[7] == "32 x 8"
    folder = tmp_path / "out" / "five_digits" / "gpg_seed3"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = [record["critic/score/mean"] for record in records if "critic/score/mean" in record]
    assert len(scores) == 2 and row[4] == f"{sum(scores) / 2:.3f} -> {sum(scores) / 2:.3f}"
    assert (tmp_path / "docs" / "recipes_learn.png").read_bytes().startswith(b"\x89PNG")
    settings = (folder / "config.yaml").read_text()
    assert "loss_mode: gpg" in settings and "train_batch_size: 32" in settings
    # A second call finds the result and trains nothing.
    written = (folder / "result.json").stat().st_mtime_ns
    assert script(*words) == 1 and (folder / "result.json").stat().st_mtime_ns == written
    assert {file: file.read_bytes() for file in (repository / "docs").glob("recipes_learn*")} == docs


def test_the_critic_has_a_table_of_its_own(script, tmp_path) -> None:
    script("--critic", "--seeds", "0", "--steps", "2")
    (row,) = rows_of(tmp_path / "docs" / "recipes_learn.md", "critic")
    assert row[:2] == ["0", "2"]
    assert all(np.isfinite(float(cell)) for cell in row[5:])
    assert (tmp_path / "docs" / "recipes_learn_critic.png").exists()


@pytest.mark.parametrize(
    ("tokens", "rewards"),
    [
        (["####", " ", "1", "2", "4", "5", "<|im_end|>"], [0, 0, 0.25, 0.25, 0.25, 0.25, 0]),
        (["####", " ", "1", "4", "4", "5", "<|im_end|>"], [0, 0, 0.25, 0, 0, 0, 0]),  # nothing behind an error
        (["1", "2", "4", "5"], [0, 0, 0, 0]),  # nothing before the mark
        (["####", "1", "2", "4", "5", "5"], [0, 0.25, 0.25, 0.25, 0.25, 0]),
        ([], []),
    ],
)
def test_token_rewards(repository, monkeypatch, tokens: Sequence[str], rewards: Sequence[float]) -> None:
    monkeypatch.syspath_prepend(repository / "examples")
    assert importlib.import_module("token_rewards").prefix_rewards(tokens, "1245") == rewards


def test_the_manager_puts_them_on_their_tokens(repository) -> None:
    config = load_config(
        "ppo_trainer",
        [
            "reward.num_workers=1",
            "reward.reward_manager.source=importlib",
            f"reward.reward_manager.module.path={repository / 'examples' / 'token_rewards.py'}",
            "reward.reward_manager.module.name=PrefixRewards",
        ],
    )
    tokenizer = build_tokenizer()
    answers = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in ("#### 12", "#### 22")]
    batch = DataProto.from_dict(
        tensors={
            "responses": torch.tensor([[*answer, 0] for answer in answers]),
            "response_mask": torch.tensor([[1, 1, 1, 1, 1, 0]] * 2),
        },
        non_tensors={
            "data_source": np.array(["hybridrl/sort"] * 2, dtype=object),
            "reward_model": np.array([{"ground_truth": "12"}] * 2, dtype=object),
        },
    )
    manager = create_reward_manager(config, tokenizer)
    try:
        result = manager(batch, return_dict=True)
    finally:
        manager.close()
    assert result["reward_tensor"].tolist() == [[0, 0, 0.5, 0.5, 0, 0], [0] * 6]
    assert result["reward_extra_info"] == {"acc": [1.0, 0.0]}
