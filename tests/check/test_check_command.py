"""`hybridrl check`: wrong commands are refused with their key, right ones pass, and nothing is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import ray

from hybridrl.check.check_command import main

FACTS = json.loads((Path(__file__).parents[1] / "plan" / "public_models.json").read_text(encoding="utf-8"))
SMALL = ("data.train_batch_size=16", "data.max_prompt_length=64", "data.max_response_length=32")
REWARDS = """
def same(data_source, solution_str, ground_truth, extra_info):
    return 0.5


def fails(data_source, solution_str, ground_truth, extra_info):
    raise KeyError("my own mistake")


def needs_column(solution_str, no_such_column):
    return 1.0


def right(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth in solution_str)


def graded(data_source, solution_str, ground_truth, extra_info):
    right = ground_truth in solution_str
    return {"score": float(right), "acc": right}
"""


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def grpo(model: Path, data: Path, *more: str) -> list[str]:
    words = [f"model={model}", f"data.train_files={data / 'train.parquet'}", *SMALL, "ppo_mini_batch_size=16"]
    return ["grpo", *words, *more]


def checked(capsys: pytest.CaptureFixture[str], words: list[str], status: int = 0) -> dict[str, Any]:
    was_there = ray.is_initialized()
    assert main([*words, "--json"], "hybridrl check") == status, capsys.readouterr()
    assert ray.is_initialized() == was_there
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert bool(result["problems"]) == (status == 2)
    return result


def test_a_right_command_passes_and_shows_what_it_will_do(
    micro_model: Path, sort_data: Path, capsys: pytest.CaptureFixture[str], in_own_folder: Path
) -> None:
    words = grpo(micro_model, sort_data, "critic.optim.lr=1e-5", "lr=1e-5", "data.max_prompt_length=18")
    words.append("data.filter_overlong_prompts=False")
    words.append("data.truncation=left")
    result = checked(capsys, words)
    settings = {row["key"]: row for row in result["settings"]}
    rate = settings["actor_rollout_ref.actor.optim.lr"]
    assert (rate["value"], rate["origin"], rate["acts"]) == (1e-5, " (command line)", True)
    assert not settings["critic.optim.lr"]["acts"] and "adv_estimator" in settings["critic.optim.lr"]["reason"]
    data = result["data"]
    assert (data["rows"], data["rendered"], data["limit"]) == (64, 64, {"data.max_prompt_length": 18})
    assert (
        data["longer"] == 64 and data["tokens"]["largest"] > 18 and any("max_prompt" in w for w in result["warnings"])
    )
    assert len(data["shown"]) == 2 and all("Sort: " in text and "assistant" in text for text in data["shown"])
    assert [(row["score"], row["wrong_score"]) for row in result["reward"]["rows"]] == [(1.0, 0.0)] * 4
    assert sorted(path.name for path in in_own_folder.iterdir()) == ["rewards.py"]


@pytest.mark.parametrize(
    ("function", "metric", "is_there", "words"),
    [
        ("graded", "acc", True, ()),
        ("graded", "score", True, ()),
        ("graded", "seq_reward", True, ()),
        ("graded", "accuracy", False, ()),
        ("right", "acc", True, ()),  # the number itself
        ("same", "acc", False, ()),  # which tells no right from wrong
        ("same", "acc", True, ("reward.reward_manager.name=prime",)),
        ("fails", "accuracy", None, ("reward.on_error=drop", "reward.max_error_rate=1")),
    ],
)
def test_a_metric_of_dynamic_sampling_that_no_sample_will_have(
    micro_model: Path,
    sort_data: Path,
    capsys: pytest.CaptureFixture[str],
    function: str,
    metric: str,
    is_there: bool | None,
    words: tuple[str, ...],
) -> None:
    """None: there is no answer by which it could be known."""
    words = (f"reward=rewards.py:{function}", "algorithm.filter_groups.enable=True", *words)
    key = f"algorithm.filter_groups.metric={metric}"
    warnings = checked(capsys, grpo(micro_model, sort_data, *words, key))["warnings"]
    about = [warning for warning in warnings if key in warning]
    assert bool(about) == (is_there is False) and all("score" in warning for warning in about)


def test_text_has_the_same_sections(micro_model: Path, sort_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(grpo(micro_model, sort_data, "--rows", "4"), "hybridrl check") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith(":") and line[0] != " "][:3] == ["settings:", "data:", "reward:"]
    assert lines[-1] == "no problem" and "  4 of 64 rows rendered: " in "\n".join(lines)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("data.no_such_key=1",), ("data.no_such_key",)),
        (("lr=much",), ("actor_rollout_ref.actor.optim.lr",)),
        (("data.train_files=none.parquet",), ("data.train_files",)),
        (("data.prompt_key=question",), ("data.prompt_key", "question")),
        (("data.train_batch_size=128", "ppo_mini_batch_size=128"), ("data.train_batch_size=128",)),
        (("data.max_prompt_length=8", "data.truncation=error"), ("data.max_prompt_length=8",)),
        (("algorithm.adv_estimator=nothing",), ("algorithm.adv_estimator=nothing",)),
        (("machine=4",), ("placement.machine=4", "placement.devices")),
        (("model=/no/such/model",), ("/no/such/model",)),
        (("reward.custom_reward_function.path=none.py",), ("reward.custom_reward_function.path",)),
        (("reward.custom_reward_function.path=rewards.py", "reward.custom_reward_function.name=none"), ("none",)),
        (
            ("reward.custom_reward_function.path=rewards.py", "reward.custom_reward_function.name=needs_column"),
            ("no_such_column",),
        ),
        (
            ("reward.custom_reward_function.path=rewards.py", "reward.custom_reward_function.name=fails"),
            ("my own mistake",),
        ),
        (("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "model_engine=megatron"), ("tensor_model",)),
        (
            ("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",),
            ("ulysses_sequence_parallel_size",),
        ),
        (
            ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"),
            ("rollout.name=hf", "heads of size 16"),
        ),
        (("trainer.logger=[no_tracker]",), ("trainer.logger", "no_tracker")),
        (("devices=8xH1",), ("H1", "H100")),
        (("devices=8xH100", "trainer.nnodes=2", "trainer.n_gpus_per_node=8"), ("trainer.nnodes=2", "devices=8xH100")),
        (("trainer.resume_mode=resume_path", "trainer.resume_from_path=none"), ("trainer.resume_from_path",)),
    ],
)
def test_a_wrong_command_is_refused_by_its_key(
    more: tuple[str, ...],
    named: tuple[str, ...],
    micro_model: Path,
    sort_data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    problems = "\n".join(checked(capsys, grpo(micro_model, sort_data, *more), 2)["problems"])
    assert all(name in problems for name in named), problems


def test_independent_problems_are_all_named(
    micro_model: Path, sort_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("data.val_files=none.parquet", "actor_rollout_ref.rollout.name=vllm", "ppo_mini_batch_size=32")
    reward = ("reward.custom_reward_function.path=rewards.py", "reward.custom_reward_function.name=none")
    problems = checked(capsys, grpo(micro_model, sort_data, *more, *reward), 2)["problems"]
    for name in ("data.val_files", "heads of size 16", "ppo_mini_batch_size=32", "custom_reward_function"):
        assert any(name in problem for problem in problems), problems


def test_a_reward_that_does_not_tell_answers_apart_is_a_warning(
    micro_model: Path, sort_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = ("reward.custom_reward_function.path=rewards.py", "reward.custom_reward_function.name=same")
    result = checked(capsys, grpo(micro_model, sort_data, *reward))
    assert [(row["score"], row["wrong_score"]) for row in result["reward"]["rows"]] == [(0.5, 0.5)] * 4
    assert any("reward function" in warning for warning in result["warnings"])


def test_memory_and_seconds_on_named_devices(
    micro_model: Path, sort_data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A large model that does not fit on one device is refused, and on many it is not."""
    large = tmp_path / "large"
    large.mkdir()
    for file in micro_model.iterdir():
        if "safetensors" not in file.name:
            (large / file.name).write_bytes(file.read_bytes())
    (large / "config.json").write_text(json.dumps(FACTS["qwen2.5-7b"]))
    words = ["devices=8xH100", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=vllm"]
    result = checked(capsys, grpo(large, sort_data, *words), 2)
    assert any("update_actor" in problem and "GiB" in problem for problem in result["problems"])
    assert any("uses 1 of 8" in warning for warning in result["warnings"])
    words[1] = "trainer.n_gpus_per_node=8"
    (problem,) = checked(capsys, grpo(large, sort_data, *words), 2)["problems"]
    assert "safetensors" in problem
    result = checked(capsys, grpo(large, sort_data, *words, "--no-weights"))
    prediction = result["prediction"]
    assert prediction["devices"] == {"name": "H100", "count": 8, "used": 8}
    assert prediction["seconds"]["step"] > 0 and prediction["bytes"]["update_actor"] < 0.9 * 80e9


@pytest.mark.parametrize(
    ("program", "file"), [("sft", "sft_train"), ("dpo", "pairs"), ("kto", "pairs"), ("rm", "pairs")]
)
def test_fine_tuning(
    program: str, file: str, micro_model: Path, sort_data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pairs = {"prompt": ["Sort: 31"] * 16, "chosen": ["13"] * 16, "rejected": ["31"] * 16}
    pd.DataFrame(pairs).to_parquet(tmp_path / "pairs.parquet")
    folder = sort_data if file == "sft_train" else tmp_path
    words = [program, f"model={micro_model}", f"data.train_files={folder / file}.parquet", "data.train_batch_size=8"]
    result = checked(capsys, [*words, "devices=8xH100", "trainer.n_gpus_per_node=8"])
    assert "[[" in result["data"]["shown"][0] and result["prediction"]["devices"]["used"] == 8
    assert ("reference" in result["prediction"]["bytes"]) == (program in ("dpo", "kto"))
    problems = checked(capsys, [*words, "data.max_length=8"], 2)["problems"]
    assert any("data.max_length=8" in problem for problem in problems)
    problems = checked(capsys, [*words, "data.train_batch_size=640"], 2)["problems"]
    assert any("data.train_batch_size=640" in problem for problem in problems)


def test_the_planner_chooses_for_named_devices(
    micro_model: Path, sort_data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """16 H100, Qwen3-30B-A3B, GRPO, answers of 8,192 tokens: the words of docs/check.md."""
    large = tmp_path / "Qwen3-30B-A3B"
    large.mkdir()
    for file in micro_model.iterdir():
        if "safetensors" not in file.name:
            (large / file.name).write_bytes(file.read_bytes())
    (large / "config.json").write_text(json.dumps(FACTS["qwen3-30b-a3b"]))
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
    words = page.split("`hybridrl check grpo placement=auto", 1)[1].split("`")[0].split()
    words = [word.replace("train.parquet", str(sort_data / "train.parquet")) for word in words]
    words = [word.replace("_size=512", "_size=64").replace("_size=128", "_size=16") for word in words]  # of 64 rows
    result = checked(capsys, ["grpo", "placement=auto", *words, "--no-weights"])
    assert result["planned"]["trainer.nnodes"] == 2 and result["planned"]["trainer.n_gpus_per_node"] == 8
    assert result["prediction"]["devices"] == {"name": "H100", "count": 16, "used": 16}
    problems = checked(capsys, ["grpo", "placement=auto", *words, "devices=1xH100", "--no-weights"], 2)["problems"]
    assert any("devices=1xH100" in problem for problem in problems)


@pytest.mark.slow(40)
@pytest.mark.parametrize("program", ["grpo", "sft", "dpo"])
def test_as_a_user_types_it(
    program: str, micro_model: Path, sort_data: Path, finish: Callable[..., Any], tmp_path: Path
) -> None:
    pairs = {"prompt": ["Sort: 31"] * 16, "chosen": ["13"] * 16, "rejected": ["31"] * 16}
    pd.DataFrame(pairs).to_parquet(tmp_path / "pairs.parquet")
    files = {"grpo": sort_data / "train.parquet", "sft": sort_data / "sft_train.parquet"}
    words = [f"model={micro_model}", f"data.train_files={files.get(program, tmp_path / 'pairs.parquet')}", "lr=1e-5"]
    words += [*SMALL, "ppo_mini_batch_size=16"] if program == "grpo" else ["data.train_batch_size=16"]
    command = [sys.executable, "-m", "hybridrl", "check", program, *words]
    ended = finish(command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "no problem"
    ended = finish([*command, "trainer.no_such_key=1"], cwd=tmp_path)
    assert ended.returncode == 2 and "problem: trainer.no_such_key" in ended.stdout
