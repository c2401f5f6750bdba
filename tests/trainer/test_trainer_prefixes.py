"""A whole GRPO run that computes shared prefixes once trains as one that does not (`model.share_prefixes`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_tools import trained

REWARD = Path(__file__).parents[2] / "recipes" / "smoke_reward.py"
ACTOR = "actor_rollout_ref.actor"
STEPS = 2


@pytest.fixture(scope="module", autouse=True)
def _ray(ray_session: None) -> None:
    """All runs of this file share one Ray."""


@pytest.fixture(scope="module")
def grpo(micro_model: Path, sort_data: Path) -> list[str]:
    """Two updates per step on two ranks, so that old log-probabilities and those of the reference are computed."""
    return [
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"reward.custom_reward_function.path={REWARD}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=7",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.optim.lr=1e-3",
        # Adam divides by the gradient's size: without this, rounding errors of tiny gradients become whole steps
        f"{ACTOR}.optim.override_optimizer_config.eps=1e-3",
        f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra]",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "trainer.threads_per_worker=1",
        "trainer.logger=[file]",
        "trainer.save_freq=1",
        f"trainer.total_training_steps={STEPS}",
    ]


def records(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step that are the same in every run of the same training."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    groups = ("actor/", "critic/", "rollout_corr/", "response_length/")
    return [{key: value for key, value in line.items() if key.startswith(groups)} for line in lines]


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {}
    for file in sorted((folder / f"global_step_{step}" / "actor" / "model").rglob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found.setdefault(name, []).append(tensor.flatten())
    assert found
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.slow
def test_a_run_that_shares_prefixes_equals_one_that_does_not(grpo: list[str], tmp_path: Path) -> None:
    folders = {share: tmp_path / str(share) for share in (True, False)}
    for share, folder in folders.items():
        # verl's name of the setting
        with trained(*grpo, f"{ACTOR}.use_prefix_grouper={share}", f"trainer.default_local_dir={folder}"):
            pass
    shared, apart = (records(folder) for folder in folders.values())
    assert len(shared) == len(apart) == STEPS and apart[1]["actor/grad_norm"] > 0
    for step, (found, expected) in enumerate(zip(shared, apart, strict=True)):
        # A prompt of about 20 tokens is computed for each rank once in place of four times.
        assert found.pop("actor/shared_prefix_frac") > 0.4
        assert found.pop("actor/shared_flops_frac") > 0.2
        assert found == pytest.approx(expected, rel=2e-3, abs=1e-5), f"step {step}"
    # Passes tell what they save, too.
    names = {f"perf/shared_{what}_frac/{phase}" for what in ("prefix", "flops") for phase in ("old_log_prob", "ref")}
    for share, folder in folders.items():
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
            told = {name: line[name] for name in line if name.startswith("perf/shared_")}
            assert set(told) == (names if share else set()) and all(value > 0.2 for value in told.values())
    expected = saved(folders[False], STEPS)
    for name, tensor in saved(folders[True], STEPS).items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=1e-3, msg=name)

    # A step that is computed again after a resume is the same bit for bit.
    resumed = tmp_path / "resumed"
    words = [*grpo, "actor_rollout_ref.model.share_prefixes=True", f"trainer.default_local_dir={resumed}"]
    first = folders[True] / "global_step_1"
    with trained(*words, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={first}"):
        pass
    again = saved(resumed, STEPS)
    for name, tensor in saved(folders[True], STEPS).items():
        assert torch.equal(again[name], tensor), name
