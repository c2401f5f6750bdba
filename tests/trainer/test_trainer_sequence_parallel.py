"""Whole runs whose ranks share sequences (`ulysses_sequence_parallel_size`) train as runs on one rank do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_tools import trained

from hybridrl.config import load_config, validate
from hybridrl.errors import UserError
from hybridrl.trainer.ppo.prepare_ppo import prepare

REWARD = Path(__file__).parents[2] / "recipes" / "smoke_reward.py"
ACTOR = "actor_rollout_ref.actor"
STEPS = 2
#: verl's names for the policy, which the reference follows, and for the critic
SHARED = [f"{ACTOR}.ulysses_sequence_parallel_size=2", "critic.ulysses_sequence_parallel_size=2"]


@pytest.fixture(scope="module")
def ppo(micro_model: Path, sort_data: Path) -> list[str]:
    """PPO with critic and reference policy, on token budgets. Greedy responses depend on the weights alone."""
    return [
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"reward.custom_reward_function.path={REWARD}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.do_sample=False",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "data.train_batch_size=6",
        "data.max_prompt_length=24",
        "data.max_response_length=7",
        f"{ACTOR}.ppo_mini_batch_size=3",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu=40",
        "critic.ppo_max_token_len_per_gpu=40",
        f"{ACTOR}.optim.lr=1e-3",
        "critic.optim.lr=1e-3",
        # Adam divides by the gradient's size: without this, rounding errors of tiny gradients become whole steps
        f"{ACTOR}.optim.override_optimizer_config.eps=1e-3",
        "critic.optim.override_optimizer_config.eps=1e-3",
        f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra]",
        "critic.checkpoint.save_contents=[model,optimizer,extra]",
        "trainer.device=cpu",
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


def saved(folder: Path, step: int, role: str) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {}
    for file in sorted((folder / f"global_step_{step}" / role / "model").rglob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found.setdefault(name, []).append(tensor.flatten())
    assert found
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_policy_critic_and_reference_that_share_sequences(ppo: list[str], tmp_path: Path) -> None:
    folders = {ranks: tmp_path / str(ranks) for ranks in (1, 2)}
    for ranks, folder in folders.items():
        shared = SHARED if ranks == 2 else []
        with trained(*ppo, *shared, f"trainer.n_gpus_per_node={ranks}", f"trainer.default_local_dir={folder}") as (
            trainer,
            _,
        ):
            learner = trainer.learner
            assert [learner.groups[spec.name].dp_size(spec.mesh) for spec in learner.roles] == [1, 1, 1]
    one, two = (records(folder) for folder in folders.values())
    assert len(one) == len(two) == STEPS and one[1]["actor/grad_norm"] > 0
    for step, (expected, found) in enumerate(zip(one, two, strict=True)):
        assert found == pytest.approx(expected, rel=2e-3, abs=1e-5), f"step {step}"
    for role in ("actor", "critic"):
        expected, found = (saved(folder, STEPS, role) for folder in folders.values())
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=1e-3, msg=f"{role}: {name}")

    # A checkpoint of ranks that share sequences continues on one that does not.
    words = [*ppo, f"trainer.default_local_dir={folders[2]}", f"trainer.total_training_steps={STEPS + 1}"]
    with trained(*words, "trainer.n_gpus_per_node=1"):
        assert len(records(folders[2])) == STEPS + 1


def test_sizes_that_do_not_fit_end_the_run_before_it_starts(ppo: list[str]) -> None:
    for words, fault in {
        (f"{ACTOR}.ulysses_sequence_parallel_size=2",): rf"{ACTOR}\.fsdp_config: .*=2 does not divide the 1 ranks",
        ("critic.fsdp.ulysses_sequence_parallel_size=4", "trainer.n_gpus_per_node=4"): r"critic\.fsdp: .*=4.*heads",
    }.items():
        with pytest.raises(UserError, match=fault):
            prepare(load_config("ppo_trainer", [*ppo, *words]))


def test_verls_names_act_and_the_reference_follows_the_policy(ppo: list[str]) -> None:
    def sizes(*words: str) -> tuple[int, int, int]:
        config = load_config("ppo_trainer", [*ppo, *words])
        policy = config.actor_rollout_ref
        groups = policy.actor.fsdp_config, policy.ref.fsdp_config, config.critic.fsdp
        return tuple(group.ulysses_sequence_parallel_size for group in groups)  # type: ignore[return-value]

    name = "ulysses_sequence_parallel_size"
    assert sizes() == (1, 1, 1)
    assert sizes(f"{ACTOR}.{name}=2") == sizes(f"{ACTOR}.fsdp_config.{name}=2") == (2, 2, 1)
    assert sizes(f"{ACTOR}.{name}=2", f"actor_rollout_ref.ref.{name}=4", f"critic.{name}=8") == (2, 4, 8)
    # verl's own trees set the old name to its default next to the new one.
    assert sizes(f"{ACTOR}.{name}=1", f"{ACTOR}.fsdp_config.{name}=2") == (2, 2, 1)
    for word in (f"engine.{name}=2", f"{name}=2"):
        assert load_config("sft_trainer", [word]).engine.ulysses_sequence_parallel_size == 2


def test_a_budget_counts_for_each_rank_of_a_sequence(ppo: list[str]) -> None:
    """A sequence has 31 tokens: 16 on each of two ranks are sufficient, 15 are not."""
    budget = f"{ACTOR}.ppo_max_token_len_per_gpu"
    validate(load_config("ppo_trainer", [*ppo, *SHARED, f"{budget}=16"]))
    for words in ([*SHARED, f"{budget}=15"], [f"{budget}=16"]):
        with pytest.raises(UserError, match=rf"{budget}=1[56] .*31 tokens"):
            validate(load_config("ppo_trainer", [*ppo, *words]))


def test_the_commands_of_the_page_compose(ppo: list[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "long_context.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", page, re.S)
    words = [[word for word in block.replace("\\\n", " ").split() if "=" in word] for block in blocks]
    config, scaled = (load_config("ppo_trainer", [*ppo, *found]) for found in words)
    assert config.actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size == 4
    assert scaled.actor_rollout_ref.model.override_config["rope_parameters"]["factor"] == 4.0
