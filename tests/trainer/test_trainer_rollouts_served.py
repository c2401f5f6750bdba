"""A reward model, a judge and a teacher in replicas of vLLM: what they say in a run, against plain models."""

import json
from pathlib import Path

import pytest
import torch
from judge_tools import PARSE, TEMPLATE, check_judgements
from scoring_tools import as_generated, said_by, scores_of
from trainer_tools import trained
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hybridrl.models.tiny import build_tiny_model

TEACHER, LOSS = "distillation.teacher_models.one", "distillation.distillation_loss"
SERVED = "reward.reward_model"


@pytest.fixture(scope="module")
def served_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A teacher and a reward model with heads of a size that vLLM supports, far from uniform."""
    teacher = build_tiny_model(tmp_path_factory.mktemp("teacher"), hidden=64, heads=2, kv_heads=1, seed=3)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    with torch.no_grad():
        model.lm_head.weight.mul_(12)
    model.save_pretrained(teacher)
    scorer = tmp_path_factory.mktemp("scorer")
    classifier = AutoModelForSequenceClassification.from_pretrained(teacher, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        classifier.score.weight.normal_(generator=torch.Generator().manual_seed(5))
    classifier.save_pretrained(scorer)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(scorer)
    return teacher, scorer


def test_vllm_says_what_transformers_says(
    ray_session, micro_model: Path, sort_data: Path, served_models: tuple[Path, Path], tmp_path: Path
) -> None:
    """The reward model on the policy's devices, the teacher in a pool of its own; both read float32."""
    teacher, scorer = served_models
    with trained(
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"data.val_files={sort_data / 'test.parquet'}",
        "data.val_max_samples=4",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.temperature=0.7",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=1",
        "trainer.test_freq=1",
        "trainer.dump_freq=1",
        "trainer.device=cpu",
        "trainer.threads_per_worker=1",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={tmp_path}",
        f"{SERVED}.enable=True",
        f"{SERVED}.model.path={scorer}",
        f"{SERVED}.rollout.name=vllm",
        "distillation.enabled=True",
        "distillation.nnodes=1",
        "distillation.n_gpus_per_node=1",
        f"{TEACHER}.model_path={teacher}",
        f"{TEACHER}.inference.name=vllm",
        f"{LOSS}.loss_mode=forward_kl_topk_tail",
        f"{LOSS}.topk=5",
    ) as (trainer, result):
        assert {name: group.resource_pool.world_size for name, group in trainer.groups.items()} == dict.fromkeys(
            ("actor_rollout", "reward_model", "teacher"), 1
        )
        batch = result.batch
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
    scores = scores_of(scorer, as_generated(scorer, batch.batch))
    assert max(scores) - min(scores) > 0.1
    assert sorted(row["rm_scores"] for row in rows) == pytest.approx(sorted(scores), abs=1e-4)
    assert batch.batch["token_level_scores"].sum(1).tolist() == pytest.approx(scores, abs=1e-4)
    for row, responses in enumerate(batch.batch["responses"]):
        mask = batch.batch["response_mask"][row].bool()
        expected = said_by(teacher, batch, row, 0.7)
        kept = {name: batch.batch[f"teacher_{name}"][row] for name in ("log_probs", "topk_log_probs", "topk_ids")}
        sampled = expected.gather(1, responses[mask][:, None])[:, 0]
        torch.testing.assert_close(kept["log_probs"][mask], sampled, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(kept["topk_log_probs"][mask], expected.topk(5).values, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            kept["topk_log_probs"][mask], expected.gather(1, kept["topk_ids"][mask]), atol=1e-4, rtol=1e-4
        )
        assert not kept["log_probs"][~mask].any()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (record,) = [one for one in records if "distillation/loss" in one]
    assert record["timing_s/teacher"] > 0 and record["timing_s/reward_model"] > 0
    assert any("val" in name for one in records for name in one)


def test_a_judge_in_vllm_answers_as_transformers_does(
    ray_session, micro_model: Path, sort_data: Path, served_models: tuple[Path, Path], tmp_path: Path
) -> None:
    """On the policy's devices, with a tokenizer of its own."""
    judge, _ = served_models
    (tmp_path / "question.txt").write_text(TEMPLATE)
    (tmp_path / "read.py").write_text(PARSE)
    with trained(
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        "algorithm.adv_estimator=grpo",
        "algorithm.missing.max_share=1",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=1",
        "trainer.dump_freq=1",
        "trainer.device=cpu",
        "trainer.threads_per_worker=1",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        f"{SERVED}.enable=True",
        f"{SERVED}.model.path={judge}",
        f"{SERVED}.rollout.name=vllm",
        f"{SERVED}.judge.enable=True",
        f"{SERVED}.judge.template={tmp_path / 'question.txt'}",
        f"{SERVED}.judge.parse.path={tmp_path / 'read.py'}",
        f"{SERVED}.judge.max_tokens=8",
    ) as (trainer, _):
        assert trainer.groups["judge"].blocking
    rows = check_judgements(tmp_path / "run" / "rollouts" / "1.jsonl", judge, system=None)
    assert len({row["judge/judgement"] for row in rows}) > 1
