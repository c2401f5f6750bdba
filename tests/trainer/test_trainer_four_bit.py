"""Whole runs with a base in 4 bits: sampler and trainer have the same base, in every program; what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from four_bit_tools import rounded_copy
from raising import raises_with
from test_trainer_lora import ACTOR, MODEL, TESTS, grpo  # noqa: F401 (a fixture)
from test_trainer_pairs import MEASURED, curves, random_model, run  # noqa: F401 (a fixture)
from test_trainer_sft import configured, conversations, records  # noqa: F401 (a fixture)
from trainer_tools import trained

from hybridrl.config import load_config
from hybridrl.config.checks.check_run import check
from hybridrl.errors import AlgorithmError, ConfigError, ModelError, RolloutError
from hybridrl.rollout import resolve_rollout
from hybridrl.trainer.generation.processes import check_reads_files
from hybridrl.trainer.ppo.prepare_ppo import prepare
from hybridrl.trainer.ppo.run_ppo import started_trainer
from hybridrl.trainer.supervised.run_supervised import run_supervised

FOUR = f"{MODEL}.load_in_4bit=True"
STRICT = "algorithm.rollout_correction.probe_threshold=1e-4"


@pytest.mark.slow
def test_the_sampler_gets_the_base_that_is_trained(ray_session: None, grpo: list[str], tmp_path: Path) -> None:  # noqa: F811
    words = [
        *(FOUR, STRICT, f"actor_rollout_ref.rollout.name={TESTS / 'rollout' / 'plain_engine.py'}:PlainEngine"),
        "trainer.total_training_steps=2",
        "trainer.save_last=False",
    ]
    with trained(*grpo, *words, f"trainer.default_local_dir={tmp_path}") as (trainer, result):
        assert result.metrics["rollout_corr/adapter_share"] == pytest.approx(1, abs=1e-3)
        assert trainer.learner.adapter_probe.done and result.metrics["actor/kl_loss"] > 0
        fields = result.batch.batch
        mask = fields["response_mask"].bool()
        torch.testing.assert_close(fields["old_log_probs"][mask], fields["rollout_log_probs"][mask], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_sampler_with_the_base_of_the_files_is_caught(ray_session: None, grpo: list[str], tmp_path: Path) -> None:  # noqa: F811
    """It drops what it is sent, and generates with weights that were never rounded: the first step ends the run."""
    engine = f"actor_rollout_ref.rollout.name={TESTS / 'trainer' / 'deaf_engine.py'}:DeafEngine"
    config = load_config("ppo_trainer", [*grpo, FOUR, STRICT, engine, f"trainer.default_local_dir={tmp_path}"])
    with pytest.raises(AlgorithmError, match="do not hold the same model"), started_trainer(config) as trainer:
        trainer.fit()


@pytest.mark.slow
def test_supervised_trainers_train_on_the_rounded_base(
    ray_session: None,
    random_model: Path,  # noqa: F811
    sort_data: Path,
    conversations: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """DPO, whose reference is that base, reward models and fine-tuning equal those on a base rounded before."""
    rounded, words = rounded_copy(random_model, tmp_path / "rounded"), ("model.lora_rank=4", "model.lora_alpha=32")
    for program in ("dpo", "rm"):
        packed = run(program, random_model, sort_data, tmp_path / program, *words, "model.load_in_4bit=True")
        plain = run(program, rounded, sort_data, tmp_path / f"{program}_rounded", *words)
        assert curves(packed, *MEASURED) == pytest.approx(curves(plain, *MEASURED), rel=1e-4, abs=1e-6)
    losses = []
    for name, model, four in (("sft", random_model, True), ("sft_rounded", rounded, False)):
        given = [*words, f"model.load_in_4bit={four}", "trainer.total_training_steps=2"]
        run_supervised(configured(model, conversations, tmp_path / name, 1, *given))
        losses.append([one["train/loss"] for one in records(tmp_path / name) if "train/loss" in one])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{MODEL}.lora_rank=0"], r"load_in_4bit=True: weights in 4 bits are not trained; set model\.lora_rank"),
        ([f"{ACTOR}.use_torch_compile=True"], r"use_torch_compile=True"),
        ([f"{MODEL}.lora_rank=0", f"{ACTOR}.strategy=megatron"], r"strategy=megatron with model\.load_in_4bit=True"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(grpo: list[str], words: list[str], message: str) -> None:  # noqa: F811
    with pytest.raises(ModelError, match=message):
        prepare(load_config("ppo_trainer", [*grpo, FOUR, *words]))


def test_engines_that_read_the_files_are_refused_by_name(grpo: list[str], micro_model: Path) -> None:  # noqa: F811
    rollout = "actor_rollout_ref.rollout"
    alone = [FOUR, f"{rollout}.name=vllm", f"{rollout}.lora_transfer=adapter"]
    with raises_with(RolloutError, "lora_transfer=adapter", "load_in_4bit=True", "lora_transfer=merged"):
        resolve_rollout(load_config("ppo_trainer", [*grpo, *alone]).actor_rollout_ref)
    judge = "reward.reward_model"
    served = [f"{judge}.enable=True", f"{judge}.model.path={micro_model}", f"{judge}.model.load_in_4bit=True"]
    with raises_with(ConfigError, "load_in_4bit=True", "reward.reward_model.rollout.name=vllm"):
        check(load_config("ppo_trainer", [*grpo, *served, f"{judge}.rollout.name=vllm"]))
    policy = load_config("generation", [f"{MODEL}.path={micro_model}", FOUR]).actor_rollout_ref
    with raises_with(RolloutError, "load_in_4bit=True", "model.path"):
        check_reads_files(policy, "vllm")
