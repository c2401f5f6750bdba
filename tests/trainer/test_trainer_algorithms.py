"""Algorithms on real workers: choices over a mini-batch, dynamic sampling across a resume, the first step's probe."""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridrl.algorithms import AlgorithmError
from hybridrl.config import load_config
from hybridrl.trainer.ppo.health_checks import HealthError
from hybridrl.trainer.ppo.learner import StepResult
from hybridrl.trainer.ppo.prepare_ppo import prepare
from hybridrl.trainer.ppo.run_ppo import started_trainer
from hybridrl.trainer.ppo.trainer import RayPPOTrainer

REWARD = Path(__file__).parents[2] / "recipes" / "smoke_reward.py"


@pytest.fixture(scope="module", autouse=True)
def _ray(ray_session: None) -> None:
    """All runs of this file share one Ray."""


@contextmanager
def trained(folder: Path, *overrides: str) -> Iterator[tuple[RayPPOTrainer, StepResult]]:
    """Run the program to its end."""
    words = ["trainer.report=False", "trainer.logger=[]", f"trainer.default_local_dir={folder}", *overrides]
    config = load_config("ppo_trainer", words)
    with started_trainer(config) as trainer:
        result = trainer.fit()
        assert result is not None
        yield trainer, result


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


def test_full_kl_in_loss_and_reward_whatever_the_ranks(base, tmp_path) -> None:
    overrides = [
        *base,
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_type=full",
        "actor_rollout_ref.actor.kl_loss_coef=0.3",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_penalty=full",
        "algorithm.kl_ctrl.kl_coef=0.3",
        "actor_rollout_ref.actor.optim.optimizer=SGD",
        "actor_rollout_ref.actor.optim.lr=0.3",
        "trainer.total_training_steps=2",
    ]
    for ranks in (1, 2):
        with trained(tmp_path / str(ranks), *overrides, f"trainer.n_gpus_per_node={ranks}") as (_, result):
            fields = result.batch.batch
            assert "ref_log_prob" not in fields.keys()  # no pass of its own for the reference
            penalty = fields["token_level_scores"] - fields["token_level_rewards"]
            torch.testing.assert_close(penalty, 0.3 * fields["ref_kl"])
    one, two = (records(tmp_path / str(ranks)) for ranks in (1, 2))
    assert one[0]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-7)  # the policy begins as its own reference
    for name in ("actor/reward_kl_penalty", "actor/ref_kl", "actor/kl_loss"):
        assert one[1][name] == pytest.approx(two[1][name], rel=1e-3) and one[1][name] > 1e-5
    first, second = (weights(tmp_path / str(ranks), 2) for ranks in (1, 2))
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5


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
    with trained(tmp_path / "whole", *overrides, "trainer.total_training_steps=4") as (_, result):
        scores = result.batch.batch["token_level_scores"].sum(1).view(-1, 3)
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


def parts(folder: Path, step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and optimizer state of the actor in a checkpoint."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for part in ("model", "optimizer"):
        files = (folder / f"global_step_{step}" / "actor" / part).rglob("*.safetensors")
        found[part] = {name: tensor for file in sorted(files) for name, tensor in load_file(file).items()}
    return found


def test_a_rollback_goes_on_from_the_last_good_checkpoint(base, tmp_path, capsys) -> None:
    """Prompts of index 12 and more all score the same, so steps 3 to 5 are bad; step 2 is the last that found the
    checkpoint before it, that of step 1, good."""
    uniform = tmp_path / "uniform.py"
    uniform.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return len(solution_str) + 0.01 * sum(map(ord, solution_str)) if extra_info['index'] < 12 else 3.0\n"
    )
    run = tmp_path / "run"
    overrides = [
        *(word for word in base if not word.startswith("reward.")),
        f"reward.custom_reward_function.path={uniform}",
        *(f"trainer.health.uniform_groups.{word}" for word in ("threshold=0.9", "patience=2", "action=rollback")),
        "trainer.max_actor_ckpt_to_keep=2",
        "data.shuffle=False",
        "data.gen_batch_size=10",
        "algorithm.normalize_rewards=running",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        "trainer.total_training_steps=5",
    ]
    with trained(run, *overrides, "trainer.n_gpus_per_node=2") as (trainer, _):
        assert trainer.learner.reward_transform.count == 2 * 18  # of steps 1 and 5
        assert trainer.run.checkpoints.store.steps() == [1, 4, 5]  # the good one is kept beside the newest two
    said = capsys.readouterr().err
    assert f"step 4: going on with the models of {run / 'global_step_1'} " in said
    first, fourth, fifth = (parts(run, step) for step in (1, 4, 5))
    assert len(first["model"]) > 10 and len(first["optimizer"]) > 20
    for part, tensors in first.items():
        assert all(torch.equal(fourth[part][name], tensor) for name, tensor in tensors.items()), part
        assert any(not torch.equal(fifth[part][name], tensor) for name, tensor in tensors.items()), part
    found = records(run)
    assert [record["health/groups_uniform"] for record in found] == [0, 0, 1, 1, 1]
    assert [record["health/rollbacks"] for record in found] == [0, 0, 0, 0, 1]
    coefficients = [record["actor/reward_kl_penalty_coeff"] for record in found]
    assert len(set(coefficients[:4])) == 4 and coefficients[4] == coefficients[1]  # as left by step 1
    surplus = [record["filter_groups/surplus"] for record in found]
    carried = [record["filter_groups/carried_over"] for record in found]
    assert (carried[1:4], carried[4]) == (surplus[:3], 0) and surplus[3] > 0
    assert f"{surplus[3]:.0f} prompts that were answered beforehand are dropped" in said
    losses = [record["actor/pg_loss"] for record in found]
    assert len(set(losses)) == 5  # and the prompts go on: no batch is trained on again

    words = [*overrides, "trainer.resume_mode=disable", f"trainer.default_local_dir={run}", "trainer.logger=[]"]
    anew = prepare(load_config("ppo_trainer", words))  # in a folder with another run's checkpoints
    with closing(anew.reward_fn):
        bad = {"health/groups_uniform": 1.0}
        anew.watch(bad)
        with pytest.raises(HealthError, match="no checkpoint of this run has a good step"):
            anew.watch(bad)


def test_remax_takes_what_a_greedy_generation_scores_as_baseline(base, micro_model, tmp_path) -> None:
    words = [word for word in base if not word.startswith(("algorithm.", "actor_rollout_ref.rollout.n="))]
    overrides = ["algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=1"]
    with trained(tmp_path, *words, *overrides) as (trainer, result):
        batch, tokenizer = result.batch, trainer.tokenizer
    model = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32)
    spec = importlib.util.spec_from_file_location("smoke_reward", REWARD)
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)
    fields, baselines = batch.batch, {}
    width = fields["prompts"].shape[1]
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        prompt = fields["prompts"][row][fields["attention_mask"][row, :width].bool()]
        answer = model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt)[None], do_sample=False, max_new_tokens=6
        )[0, len(prompt) :]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        baselines[uid] = rewards.compute_score("", text, "", None)["score"]
        assert fields["reward_baselines"][row].item() == pytest.approx(baselines[uid], abs=1e-6)
        advantages = fields["advantages"][row][fields["response_mask"][row].bool()]
        expected = fields["token_level_scores"][row].sum().item() - baselines[uid]
        assert advantages[0].item() == pytest.approx(expected, abs=1e-6)
    assert len(baselines) == 6 and len(set(baselines.values())) > 1


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
    with trained(tmp_path, *words, "algorithm.rollout_correction.loss_type=reinforce") as (_, result):
        fields = result.batch.batch
        assert torch.equal(fields["old_log_probs"], fields["rollout_log_probs"])
    (record,) = records(tmp_path)
    assert "rollout_corr/rollout_rs_masked_fraction" in record and "actor/entropy" in record
