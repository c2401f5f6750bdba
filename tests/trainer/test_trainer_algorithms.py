"""Algorithms on real workers: choices over a mini-batch, dynamic sampling across a resume, the first step's probe."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.algorithms import AlgorithmError
from hybridrl.config import load_config, validate
from hybridrl.trainer.ppo.prepare import prepare
from hybridrl.trainer.ppo.roles import resource_pools, spawn_worker_groups
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.start import workers_starting

REWARD = Path(__file__).parents[2] / "recipes" / "smoke_reward.py"


@pytest.fixture(scope="module", autouse=True)
def _ray(ray_session: None) -> None:
    """All runs of this file share one Ray."""


@contextmanager
def trained(folder: Path, *overrides: str) -> Iterator[RayPPOTrainer]:
    """Run the program to its end."""
    words = ["trainer.report=False", "trainer.logger=[]", f"trainer.default_local_dir={folder}", *overrides]
    config = load_config("ppo_trainer", words)
    validate(config)
    manager = resource_pools(config)
    with workers_starting(
        config.ray_kwargs.ray_init, manager, config.trainer.device, lambda: spawn_worker_groups(config, None, manager)
    ) as started:
        trainer = prepare(config)
        with closing(trainer.reward_fn):
            trainer.init_workers(started())
            trainer.fit()
            yield trainer


@pytest.fixture(scope="module")
def base(micro_model: Path, sort_data: Path) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"reward.custom_reward_function.path={REWARD}",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=6",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.save_freq=1",
    ]


def records(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("timing_", "perf/"))} for line in lines]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {}
    for file in sorted((folder / f"global_step_{step}" / "actor" / "model").rglob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found.setdefault(name, []).append(tensor.flatten())
    assert found
    return {name: torch.cat(parts) for name, parts in found.items()}


def test_tokens_are_chosen_over_the_mini_batch_whatever_the_ranks(base, tmp_path) -> None:
    overrides = [
        *base,
        "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.2",
        "actor_rollout_ref.actor.policy_loss.clip_cov_lb=0",
        "actor_rollout_ref.actor.policy_loss.clip_cov_ub=1000",
        "actor_rollout_ref.actor.optim.optimizer=SGD",
        "actor_rollout_ref.actor.optim.override_optimizer_config={}",
        "trainer.total_training_steps=1",
    ]
    for ranks in (1, 2):
        with trained(tmp_path / str(ranks), *overrides, f"trainer.n_gpus_per_node={ranks}"):
            pass
    one, two = (weights(tmp_path / str(ranks), 1) for ranks in (1, 2))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 2e-6
    share = [records(tmp_path / str(ranks))[0]["actor/pg_clipfrac"] for ranks in (1, 2)]
    assert share[0] == pytest.approx(share[1], abs=1e-6) and 0.1 < share[0] < 0.21


def test_dynamic_sampling_goes_on_after_a_resume_as_if_never_stopped(base, tmp_path) -> None:
    coarse = tmp_path / "coarse.py"
    coarse.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(ord((solution_str or ' ')[0]) % 2)\n"
    )
    overrides = [
        *(word for word in base if not word.startswith("reward.")),
        f"reward.custom_reward_function.path={coarse}",
        "algorithm.filter_groups.enable=True",
        "data.gen_batch_size=8",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    with trained(tmp_path / "whole", *overrides, "trainer.total_training_steps=4") as trainer:
        scores = trainer._trained.batch["token_level_scores"].sum(1).view(-1, 3)
    assert bool((scores.amax(1) > scores.amin(1)).all()) and len(scores) == 4
    for steps in (2, 4):
        with trained(tmp_path / "torn", *overrides, f"trainer.total_training_steps={steps}"):
            pass
    whole, torn = records(tmp_path / "whole"), records(tmp_path / "torn")
    assert whole == torn and [record["step"] for record in whole] == [1, 2, 3, 4]
    assert any(record["filter_groups/discarded"] > 0 for record in whole)
    assert whole[1]["filter_groups/surplus"] == whole[2]["filter_groups/carried_over"] > 0
    first, second = weights(tmp_path / "whole", 4), weights(tmp_path / "torn", 4)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_probe_stops_a_run_and_truncated_sampling_does_not(base, tmp_path) -> None:
    words = [*base, "trainer.total_training_steps=1"]
    with (
        pytest.raises(AlgorithmError, match="do not hold the same model"),
        trained(tmp_path / "stopped", *words, "algorithm.rollout_correction.probe_threshold=1e-30"),
    ):
        pass
    truncated = ["actor_rollout_ref.rollout.top_k=2", "algorithm.rollout_correction.probe_threshold=1e-3"]
    with trained(tmp_path / "truncated", *words, *truncated):
        pass
    (record,) = records(tmp_path / "truncated")
    assert record["rollout_corr/k3_kl"] > 0.1 and record["rollout_corr/probe_mean_abs_diff"] < 1e-3


def test_bypass_mode_takes_effect_in_the_workers(base, tmp_path) -> None:
    words = [*base, "trainer.total_training_steps=1", "algorithm.rollout_correction.bypass_mode=True"]
    with trained(tmp_path, *words, "algorithm.rollout_correction.loss_type=reinforce") as trainer:
        fields = trainer._trained.batch
        assert torch.equal(fields["old_log_probs"], fields["rollout_log_probs"])
    (record,) = records(tmp_path)
    assert "rollout_corr/rollout_rs_masked_fraction" in record and "actor/entropy" in record
