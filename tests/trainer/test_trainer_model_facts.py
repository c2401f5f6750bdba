"""Settings that only some models have are refused before Ray starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from raising import raises_with

from hybridrl.config import load_config
from hybridrl.errors import UserError
from hybridrl.trainer.ppo.run_ppo import run_ppo
from hybridrl.trainer.supervised.run_supervised import run_supervised

ACTOR = "actor_rollout_ref.actor"


def no_ray(*args: object, **named: object) -> None:
    raise AssertionError("Ray was started")


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", no_ray)


@pytest.mark.parametrize(
    "word",
    [
        f"{ACTOR}.freeze_vision_tower=True",
        f"{ACTOR}.fsdp_config.router_aux_loss_coef=0.01",
        f"{ACTOR}.router_replay.mode=R2",
        "actor_rollout_ref.model.target_modules=[experts]",
    ],
)
def test_settings_of_other_models(micro_model: Path, sort_data: Path, tmp_path: Path, word: str) -> None:
    words = [f"actor_rollout_ref.model.path={micro_model}", f"data.train_files={sort_data}/train.parquet"]
    words += ["data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8", "algorithm.adv_estimator=grpo", word]
    words += ["actor_rollout_ref.rollout.n=2", f"trainer.default_local_dir={tmp_path}/run"]
    words += ["actor_rollout_ref.model.lora_rank=4"] if "target_modules" in word else []
    name, value = word.split("=")
    with pytest.raises(UserError) as refused:
        run_ppo(load_config("ppo_trainer", words))
    assert name.rpartition(".")[2] in str(refused.value) and value.strip("[]") in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_settings_of_other_models_in_supervised_training(micro_model: Path, sort_data: Path, tmp_path: Path) -> None:
    words = [f"model.path={micro_model}", f"data.train_files={sort_data}/sft_train.parquet"]
    words += [f"trainer.default_local_dir={tmp_path}/run", "engine.router_aux_loss_coef=0.01"]
    with raises_with(UserError, "router_aux_loss_coef=0.01"):
        run_supervised(load_config("sft_trainer", words))
