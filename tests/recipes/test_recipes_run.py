"""Two steps of every recipe, by its own YAML, in one Ray; and the files that a recipe consists of."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hybridrl.config import load_config
from hybridrl.data.preprocess.collab import write_collab
from hybridrl.data.preprocess.colours import write_colours
from hybridrl.models.tiny import build_tiny_model
from hybridrl.models.tiny_vision import build_tiny_vision_model
from hybridrl.trainer.ppo.learner import StepResult
from hybridrl.trainer.ppo.run_ppo import started_trainer
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.supervised.run_supervised import run_supervised

RECIPES = Path(__file__).parents[2] / "recipes"
PAIRS = ("dpo", "kto", "rm")  # on pairs of answers, by programs of their own
NAMES = sorted(path.parent.name for path in RECIPES.glob("*/run.sh"))
ASKED_FOR = (
    "dpo kto rm ppo grpo grpo_lora grpo_megatron grpo_vlm dr_grpo dapo gspo rloo reinforce_pp reinforce_pp_baseline "
    "remax opo gpg cispo sapo gmpo dppo dro clip_cov kl_cov otb gdpo grpo_passk pf_ppo rollout_correction prime sppo "
    "distillation retool search_r1 collabllm maxrl m2po gvpo online_dpo spo flowrl"
)
SESSIONS = ("retool", "search_r1")  # with tools, which the prompts describe
#: a metric that the recipe alone, or few with it, reports
SHOWS = {
    "ppo": "critic/vf_loss",
    "grpo": "actor/kl_loss",
    "grpo_lora": "actor/kl_loss",
    "grpo_megatron": "actor/kl_loss",
    "grpo_vlm": "actor/kl_loss",
    "dapo": "filter_groups/generated",
    "prime": "prime/loss",
    "remax": "critic/reward_baselines/mean",
    "pf_ppo": "critic/vf_loss",
    "rollout_correction": "rollout_corr/rollout_is_mean",
    "distillation": "distillation/loss",
    "sppo": "actor/sppo_error",
    "m2po": "actor/m2",
    "gvpo": "actor/gvpo_weight",
    "online_dpo": "actor/online_dpo_weight",
    "flowrl": "actor/flowrl_weight",
    "spo": "critic/prompt_values/mean",
    "rloo": "actor/reward_kl_penalty",
    "retool": "tool_call_counts/mean",
    "search_r1": "tool_call_counts/mean",
    "collabllm": "reward/judge/mean",
}


@contextmanager
def trained(folder: Path, name: str, overrides: list[str]) -> Iterator[tuple[RayPPOTrainer, StepResult]]:
    """Run the recipe to its end."""
    words = ["trainer.report=False", "trainer.logger=[]", f"trainer.default_local_dir={folder}", *overrides]
    config = load_config("ppo_trainer", words, RECIPES / name, name)
    with started_trainer(config) as trainer:
        result = trainer.fit()
        assert result is not None
        yield trainer, result


def size(name: str, model: Path, data: Path) -> list[str]:
    words = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={data / 'train.parquet'}",
        f"reward.custom_reward_function.path={RECIPES / 'smoke_reward.py'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.total_training_steps=2",
    ]
    if name not in ("opo", "gpg"):
        words.append("actor_rollout_ref.actor.ppo_mini_batch_size=2")
    if name == "grpo_megatron":  # the engine of its YAML takes a minute to start; any that accepts weights will do
        model = build_tiny_model(model.parent / "two_kv_heads", hidden=32, heads=2, kv_heads=2)
        engine = RECIPES.parent / "tests" / "rollout" / "plain_engine.py"
        words += [f"actor_rollout_ref.model.path={model}", f"actor_rollout_ref.rollout.name={engine}:PlainEngine"]
    if name == "grpo_vlm":
        model = build_tiny_vision_model(model.parent / "vision", hidden=32, heads=2, kv_heads=1, vision_hidden=16)
        data = write_colours(data.parent / "colours", train_size=8, test_size=2)
        words += [f"actor_rollout_ref.model.path={model}", f"data.train_files={data / 'train.parquet'}"]
        words.append("data.max_prompt_length=80")
    if name == "distillation":
        teacher = build_tiny_model(model.parent / "teacher", hidden=32, heads=2, kv_heads=1, seed=1)
        words.append(f"distillation.teacher_models.teacher.model_path={teacher}")
    if name == "collabllm":
        words += [
            f"data.train_files={write_conversations(data.parent / 'conversations')}",
            "reward.custom_reward_function.path=null",
            "data.max_prompt_length=512",
            "data.max_response_length=96",
        ]
    if name in SESSIONS:
        words += ["data.max_prompt_length=1024", "actor_rollout_ref.rollout.n=3"]
    if name == "dapo":
        words.append("reward.reward_kwargs.overlong_buffer_cfg.len=2")
    return words


def write_conversations(folder: Path) -> Path:
    write_collab(folder, RECIPES / "collabllm" / "smoke")
    return folder / "train.parquet"


@pytest.fixture(scope="module")
def user_url() -> Iterator[str]:
    """The server of `--smoke`, which plays the user and the judge."""
    program = [
        RECIPES.parent / "examples" / "scripted_chat_server.py",
        RECIPES / "collabllm" / "smoke" / "script.jsonl",
    ]
    with subprocess.Popen([sys.executable, *program, "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[0]
        server.kill()


def test_there_is_a_recipe_for_each() -> None:
    assert sorted(ASKED_FOR.split()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_its_files_are_whole(name) -> None:
    readme = (RECIPES / name / "README.md").read_text()
    assert "arXiv" in readme and "## What to expect" in readme and "\n    " in readme
    assert len((RECIPES / name / f"{name}.yaml").read_text().splitlines()) <= 30
    assert os.access(RECIPES / name / "run.sh", os.X_OK)
    assert f"recipes/{name}/run.sh" in (RECIPES / name / "run.sh").read_text()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PAIRS])
def test_two_steps(name, ray_session, micro_model, sort_data, tmp_path, user_url, monkeypatch) -> None:
    monkeypatch.setenv("USER_URL", user_url)
    with trained(tmp_path, name, size(name, micro_model, sort_data)) as (_, result):
        batch = result.batch
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        numbers = [value for value in record.values() if isinstance(value, float)]
        assert all(map(math.isfinite, numbers))
        assert record["actor/grad_norm"] > 0 and record["rollout_corr/k3_kl"] >= 0
        assert SHOWS.get(name, "actor/pg_loss") in record
    advantages, mask = batch.batch["advantages"], batch.batch["response_mask"].bool()
    assert advantages[mask].abs().max() > 0 and torch.all(advantages[~mask] == 0)
    assert len(batch) == 12
    if name == "collabllm":
        assert set(batch.non_tensor_batch["judge"]) <= {3.0, 5.0, 8.0} and record["reward/effort/mean"] < 0
        assert any("user" in scores for scores in batch.non_tensor_batch["reward_scores"])


@pytest.mark.parametrize("name", PAIRS)
def test_two_steps_on_pairs(name, ray_session, micro_model, sort_data, tmp_path) -> None:
    words = [
        f"model.path={micro_model}",
        f"data.train_files={sort_data / 'pairs_train.parquet'}",
        f"data.val_files={sort_data / 'pairs_val.parquet'}",
        "data.train_batch_size=8",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "trainer.report=False",
        "trainer.logger=[]",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path}",
    ]
    run_supervised(load_config(f"{name}_trainer", words, RECIPES / name, name))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "train/loss" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(math.isfinite(record["train/loss"]) and record["train/grad_norm"] > 0 for record in steps)
    assert math.isfinite(records[-1]["val/margin"])


def test_run_sh_of_pairs_smoke(tmp_path, finish, forked) -> None:
    environment = os.environ | {"HYBRIDRL_PYTHON": forked, "OUT": str(tmp_path)}
    done = finish(["bash", str(RECIPES / "dpo" / "run.sh"), "--smoke", "trainer.report=False"], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "smoke_dpo" / "metrics.jsonl").read_text().splitlines()
    margins = [json.loads(line)["val/margin"] for line in lines if "val/margin" in line]
    assert margins[-1] > margins[0] > 0


def test_run_sh_smoke(tmp_path, finish, forked) -> None:
    environment = os.environ | {"HYBRIDRL_PYTHON": forked, "OUT": str(tmp_path)}
    done = finish(["bash", str(RECIPES / "clip_cov" / "run.sh"), "--smoke", "trainer.report=False"], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "smoke_clip_cov" / "metrics.jsonl").read_text().splitlines()
    assert len([line for line in lines if "actor/pg_clipfrac" in line]) == 2


def test_run_sh_names_a_wrong_option() -> None:
    done = subprocess.run(["bash", str(RECIPES / "grpo" / "run.sh"), "--smok"], capture_output=True, text=True)
    assert done.returncode == 2 and "--smok" in done.stderr and "--smoke" in done.stderr
