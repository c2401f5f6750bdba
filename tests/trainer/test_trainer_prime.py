"""PRIME in a run: process rewards and the update of their model against transformers and a plain PyTorch step."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises_with
from trainer_tools import trained
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.config import load_config, validate
from hybridrl.errors import ConfigError, ModelError
from hybridrl.forecast.ppo_run import forecast_run
from hybridrl.models.tiny import build_tiny_model
from hybridrl.trainer.ppo.prepare_ppo import prepare

BETA, LR = 0.3, 2e-3


def words(micro_model: Path, sort_data: Path, folder: Path) -> list[str]:
    function = folder / "odd.py"
    function.write_text("def compute_score(solution_str):\n    return float(len(solution_str) % 2)\n")
    return [
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"reward.custom_reward_function.path={function}",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=1",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={folder / 'run'}",
        "algorithm.adv_estimator=prime",
        "algorithm.gamma=0.9",
        "roles.prime.ppo_mini_batch_size=4",
        "roles.prime.ppo_micro_batch_size_per_gpu=2",
        f"roles.prime.beta_train={BETA}",
        f"roles.prime.optim.lr={LR}",
        f"roles.prime.model.path={micro_model}",
    ]


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("other_model"), hidden=32, heads=2, kv_heads=1, seed=7)


def log_probs(model: Any, fields: Any) -> torch.Tensor:
    """Of each response token [B, T], one row at a time; 0 outside the mask."""
    found = torch.zeros_like(fields["response_mask"], dtype=torch.float32)
    start = fields["input_ids"].shape[1] - found.shape[1]
    rows = []
    for ids, attention, mask in zip(
        fields["input_ids"], fields["attention_mask"], fields["response_mask"].bool(), strict=True
    ):
        tokens = ids[attention.bool()]
        logits = model(input_ids=tokens[None]).logits[0, :-1]
        picked = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
        prompt = int(attention[:start].sum())
        rows.append(torch.zeros(len(mask)).masked_scatter(mask, picked[prompt - 1 :]))
    return torch.stack(rows)


def outcome_loss(model: Any, reference: Any, fields: Any) -> torch.Tensor:
    """Equation 4 of arXiv 2502.01456, row by row."""
    with torch.no_grad():
        frozen = log_probs(reference, fields)
    rewards = BETA * (log_probs(model, fields) - frozen).sum(1)
    right = fields["token_level_scores"].sum(1)
    losses = [-(y * torch.sigmoid(z).log() + (1 - y) * torch.sigmoid(-z).log()) for z, y in zip(rewards, right)]  # noqa: B905
    return torch.stack(losses).mean()


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def test_rewards_of_tokens_and_the_advantages_that_follow(
    ray_session, micro_model, other_model, sort_data, tmp_path: Path
) -> None:
    with trained(*words(micro_model, sort_data, tmp_path), f"roles.prime.ref_path={other_model}") as (_, result):
        fields = result.batch.batch
    reference, model = load(other_model), load(micro_model)
    with torch.no_grad():
        expected = BETA * (log_probs(model, fields) - log_probs(reference, fields))
        loss = outcome_loss(model, reference, fields).item()
    mask = fields["response_mask"].bool()
    assert expected[mask].abs().max() > 0.01
    torch.testing.assert_close(torch.where(mask, fields["process_rewards"], 0.0), expected, atol=1e-4, rtol=1e-4)
    lengths, outcomes = mask.sum(1), fields["token_level_scores"].sum(1).double()
    means = expected.double().sum(1) / lengths
    for row in range(12):
        others = [other for other in range(row // 3 * 3, row // 3 * 3 + 3) if other != row]
        wanted = torch.zeros(mask.shape[1], dtype=torch.float64)
        for t in range(int(lengths[row])):
            ahead = [0.9 ** (s - t) * (expected[row, s] - means[others].mean()) for s in range(t, int(lengths[row]))]
            wanted[t] = sum(ahead) + outcomes[row] - outcomes[others].mean()
        torch.testing.assert_close(fields["advantages"][row].double(), wanted, atol=1e-3, rtol=1e-3)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (record,) = [record for record in records if "prime/loss" in record]
    assert record["prime/loss"] == pytest.approx(loss, abs=1e-4)
    assert record["prime/right/mean"] == pytest.approx(outcomes.mean().item()) and record["prime/grad_norm"] > 0
    assert record["timing_s/process_rewards"] > 0 and record["timing_s/update_prime"] > 0
    saved = tmp_path / "run" / "global_step_1"
    assert (saved / "prime" / "model").is_dir() and (saved / "prime" / "optimizer").is_dir()


def test_two_ranks_that_learn_first_score_with_what_they_learned(
    ray_session, micro_model, sort_data, tmp_path: Path
) -> None:
    own = ["roles.prime.update=before", "placement.pools={policy: [1], process: [2]}"]
    own.append("placement.roles={actor_rollout_ref: policy, prime: process}")
    with trained(*words(micro_model, sort_data, tmp_path), *own) as (trainer, result):
        assert trainer.groups["prime"].world_size == 2
        fields = result.batch.batch
    model, reference = load(micro_model), load(micro_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.01)
    loss = outcome_loss(model, reference, fields)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    with torch.no_grad():
        expected = BETA * (log_probs(model, fields) - log_probs(reference, fields))
    mask = fields["response_mask"].bool()
    assert loss.item() == pytest.approx(0.6931, abs=1e-3) and expected.abs().max() > 0.005
    torch.testing.assert_close(torch.where(mask, fields["process_rewards"], 0.0), expected, atol=2e-4, rtol=1e-2)


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("roles.prime.update=never", r"roles\.prime\.update=.*after, before"),
        ("roles.prime.ppo_mini_batch_size=3", r"roles\.prime\.ppo_mini_batch_size=3"),
        ("roles.prime.model.path=./gone", r"roles\.prime\.model\.path=\./gone"),
        ("roles.prime.beta=1", r"roles\.prime\.beta.*beta_train"),
        ("algorithm.prime_norm=max", r"algorithm\.prime_norm=.*batch_norm"),
    ],
)
def test_settings_that_cannot_work_are_refused(micro_model, sort_data, tmp_path, word, named) -> None:
    with pytest.raises(ConfigError, match=named):
        validate(load_config("ppo_trainer", [*words(micro_model, sort_data, tmp_path), word]))


@pytest.mark.parametrize("key", ["model.path", "ref_path"])
def test_a_model_that_would_read_other_text_is_refused(micro_model, sort_data, tmp_path, key: str) -> None:
    """Both models get the policy's token ids."""
    other = tmp_path / "other"
    shutil.copytree(micro_model, other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(other)
    config = load_config("ppo_trainer", [*words(micro_model, sort_data, tmp_path), f"roles.prime.{key}={other}"])
    with pytest.raises(ModelError, match=rf"tokenizer of .*other is not the policy's.*set roles\.prime\.{key} to"):
        prepare(config)


@pytest.mark.parametrize(("file", "named"), [("config.json", "no config.json"), ("model.safetensors", "weights")])
def test_a_copy_that_cannot_be_read_is_refused_before_models_load(
    micro_model, sort_data, tmp_path, file: str, named: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(micro_model, other)
    (other / file).unlink()
    config = load_config("ppo_trainer", [*words(micro_model, sort_data, tmp_path), f"roles.prime.ref_path={other}"])
    with raises_with(ModelError, "other", named):
        prepare(config)


def test_memory_of_the_model_and_its_copy_is_forecast(micro_model, sort_data, tmp_path) -> None:
    config = load_config("ppo_trainer", words(micro_model, sort_data, tmp_path))
    found = forecast_run(config)
    policy, prime = found.roles["actor_rollout"], found.roles["prime"]
    assert policy is not None and prime is not None
    assert prime.resident == policy.resident + 4 * policy.parameters  # a second copy in float32
    assert found.phases()["update_prime"] > found.phases()["process_rewards"] > prime.resident


@pytest.mark.slow(10)
@pytest.mark.parametrize(
    ("update", "size"), [("after", "tensor_model_parallel_size"), ("before", "pipeline_model_parallel_size")]
)
def test_megatron_shares_the_model_and_its_copy_over_ranks(
    ray_session, sort_data, tmp_path: Path, update: str, size: str
) -> None:
    """The loss is that of one process, before the first step of the optimizer."""
    first = build_tiny_model(tmp_path / "first", hidden=32, heads=2, kv_heads=2)
    other = build_tiny_model(tmp_path / "other", hidden=32, heads=2, kv_heads=2, seed=7)
    own = [f"roles.prime.update={update}", f"roles.prime.ref_path={other}", "roles.prime.strategy=megatron"]
    own += [f"roles.prime.megatron.{size}=2", "placement.pools={policy: [1], process: [2]}"]
    own.append("placement.roles={actor_rollout_ref: policy, prime: process}")
    with trained(*words(first, sort_data, tmp_path), *own) as (_, result):
        fields = result.batch.batch
    model, reference = load(first), load(other)
    with torch.no_grad():
        expected = BETA * (log_probs(model, fields) - log_probs(reference, fields))
        loss = outcome_loss(model, reference, fields).item()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (record,) = [record for record in records if "prime/loss" in record]
    assert record["prime/loss"] == pytest.approx(loss, abs=1e-4)
    if update == "after":
        mask = fields["response_mask"].bool()
        torch.testing.assert_close(torch.where(mask, fields["process_rewards"], 0.0), expected, atol=1e-4, rtol=1e-4)
