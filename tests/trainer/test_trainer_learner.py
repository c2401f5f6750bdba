"""The learner over worker groups that run in this process: order, what is handed on, and what comes back."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises_with

from hybridrl.config import load_config
from hybridrl.errors import WorkerDiedError
from hybridrl.protocol import DataProto, object_array
from hybridrl.trainer.failed_batches import FailedBatches
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.batching import spread_over_ranks
from hybridrl.trainer.ppo.learner import Learner
from hybridrl.trainer.ppo.sampler import ScoredBatch
from hybridrl.utils.metrics import Metric
from hybridrl.workers.loss_prepass import ROW_IDS
from hybridrl.workers.update_plan import UpdatePlan

PROMPTS, SAMPLES, WIDTH = 4, 2, 6


class PlainGroup:
    """Two shards of a policy whose log-probability of a token is minus a hundredth of its id."""

    def __init__(self) -> None:
        self.shares: bool | None = False
        self.evaluated: list[DataProto] = []
        self.updated: list[DataProto] = []
        self.calls: list[str] = []

    def dp_size(self, mesh: str) -> int:
        assert mesh == "actor"
        return 2

    def shares_prefixes(self) -> list[bool | None]:
        return [self.shares] * 2

    def compute_log_prob(self, batch: DataProto) -> Any:
        self.evaluated.append(batch)
        self.calls.append("compute_log_prob")
        values = -batch.batch["responses"] / 100
        found = DataProto.from_dict(tensors={"old_log_probs": values, "entropys": -2 * values})
        return SimpleNamespace(get=lambda: found)

    def update_actor(self, batch: DataProto) -> Any:
        self.updated.append(batch)
        self.calls.append("update_actor")
        number = float(len(self.updated))
        done = DataProto(meta_info={"metrics": {"actor/pg_loss": [Metric(number, 1.0)]}})
        return SimpleNamespace(get=lambda: done)

    def save_checkpoint(self, folder: str, contents: list[str]) -> None:
        self.calls.append("save_checkpoint")

    def load_checkpoint(self, folder: str, contents: list[str]) -> None:
        self.calls.append("load_checkpoint")


def sampled_batch(seed: int = 0) -> ScoredBatch:
    rows = PROMPTS * SAMPLES
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(WIDTH)[None] < torch.arange(1, rows + 1)[:, None].clamp(max=WIDTH)).long()
    ids = torch.randint(1, 90, (rows, 2 + WIDTH), generator=generator)
    scores = torch.zeros(rows, WIDTH)
    scores[:, 0] = torch.randn(rows, generator=generator)
    attention = torch.cat([torch.ones(rows, 2, dtype=torch.int64), mask], 1)
    batch = DataProto.from_dict(
        tensors={
            "prompts": ids[:, :2],
            "responses": ids[:, 2:],
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": attention.cumsum(1) - 1,
            "response_mask": mask,
            "rollout_log_probs": -ids[:, 2:] / 100,
            "token_level_scores": scores,
        },
        non_tensors={"uid": np.repeat([f"0-{p}" for p in range(PROMPTS)], SAMPLES).astype(object)},
        meta_info={"temperature": 1.0},
    )
    return ScoredBatch(batch, {}, {})


def learner_of(group: PlainGroup, folder: Path, *words: str) -> Learner:
    config = load_config(
        "ppo_trainer",
        [
            "algorithm.adv_estimator=grpo",
            f"data.train_batch_size={PROMPTS}",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
            *words,
        ],
    )
    return Learner(config, {"actor_rollout": group}, FailedBatches(folder))  # type: ignore[dict-item]


def test_rows_are_balanced_for_evaluation_and_come_back_in_order(tmp_path) -> None:
    group, sampled = PlainGroup(), sampled_batch()
    before = {name: tensor.clone() for name, tensor in sampled.batch.batch.items()}
    result = learner_of(group, tmp_path).learn(sampled)
    (asked,) = group.evaluated
    assert not torch.equal(asked.batch["responses"], before["responses"])  # reordered on the way
    shares = [int(half.sum()) for half in asked.batch["attention_mask"].sum(1).chunk(2)]
    assert abs(shares[0] - shares[1]) <= WIDTH
    fields = result.batch.batch
    assert torch.equal(fields["responses"], before["responses"])
    torch.testing.assert_close(fields["old_log_probs"], -before["responses"] / 100)
    totals = before["token_level_scores"].sum(1).view(PROMPTS, SAMPLES)
    expected = (totals - totals.mean(1, keepdim=True)) / (totals.std(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(fields["advantages"][:, 0], expected.flatten(), atol=1e-5, rtol=1e-5)
    assert set(sampled.batch.batch.keys()) == set(before)  # the sampler's batch is as it was
    assert all(torch.equal(sampled.batch.batch[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(("shares", "related"), [(True, False), (None, True), (None, False), (False, True)])
def test_rows_of_a_prompt_stay_on_one_rank_where_they_share_enough(shares, related, tmp_path) -> None:
    """What an engine that decides for itself saves is known from the tokens. Two long rows are balanced apart."""
    group, sampled = PlainGroup(), sampled_batch()
    group.shares = shares
    fields = sampled.batch.batch
    fields["response_mask"][:2], fields["response_mask"][2:, 1:] = 1, 0
    fields["attention_mask"][:, 2:] = fields["response_mask"]
    if related:
        for name in ("prompts", "input_ids", "responses"):
            fields[name][1::2] = fields[name][::2]
    words = [f"actor_rollout_ref.actor.{word}" for word in ("ppo_mini_batch_size=4", "ppo_epochs=2")]
    learner_of(group, tmp_path, *words).learn(sampled)
    for batch, rows in ((group.evaluated[0], None), (group.updated[0], group.updated[0].batch[ROW_IDS])):
        found = batch.batch["responses"]
        if rows is None:
            rows = torch.tensor([int((fields["responses"] == row).all(1).nonzero()[0]) for row in found])
        prompts = [set((half // SAMPLES).tolist()) for half in rows.chunk(2)]
        assert prompts[0].isdisjoint(prompts[1]) == (shares or (shares is None and related))


def test_a_result_holds_metrics_and_timing_and_cannot_be_changed(tmp_path) -> None:
    group = PlainGroup()
    learner = learner_of(group, tmp_path, "actor_rollout_ref.actor.ppo_epochs=3")
    first, second = learner.learn(sampled_batch()), learner.learn(sampled_batch(1))
    assert (first.step, second.step, learner.step) == (1, 2, 2)
    assert first.metrics["actor/pg_loss"] == 2.0 and second.metrics["actor/pg_loss"] == 5.0  # means of three calls
    mask = first.batch.batch["response_mask"].bool()
    assert first.metrics["actor/entropy"] == pytest.approx(
        float(first.batch.batch["responses"][mask].sum() / 50 / mask.sum())
    )
    assert first.timing.keys() == {"old_log_prob", "rollout_corr", "adv", "update_actor"}
    assert first.metrics["global_seqlen/balanced_max"] >= first.metrics["global_seqlen/balanced_min"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.step = 3  # type: ignore[misc]


def test_each_epoch_uses_every_row_once(tmp_path) -> None:
    group = PlainGroup()
    learner_of(group, tmp_path, "actor_rollout_ref.actor.ppo_epochs=2").learn(sampled_batch())
    assert len(group.updated) == 2
    for shards in group.updated:
        plan = UpdatePlan.of(shards)
        assert plan.dp_size == 2 and sum(part.rows for part in plan.mini_batches) * 2 == len(shards)
        assert sorted(shards.batch[ROW_IDS].tolist()) == list(range(PROMPTS * SAMPLES))


def test_whoever_generates_hears_of_each_change_of_the_weights_before_it(tmp_path) -> None:
    group = PlainGroup()
    learner = learner_of(group, tmp_path)
    learner.on_weights_change.append(lambda: group.calls.append("weights will change"))
    learner.learn(sampled_batch())
    tracked = ("kl_ctrl", "reward_transform", "prompt_values")
    state = {name: getattr(learner, name).state_dict() for name in tracked}
    learner.load(tmp_path, state)
    assert group.calls == [
        "compute_log_prob",
        "weights will change",
        "update_actor",
        "weights will change",
        "load_checkpoint",
    ]


def test_the_values_of_prompts_are_resumed_and_used(tmp_path) -> None:
    sampled, groups = sampled_batch(), [PlainGroup(), PlainGroup()]
    fields, rows = sampled.batch.batch, PROMPTS * SAMPLES
    fields["token_level_scores"] = (fields["token_level_scores"] > 0).float()
    messages = [[{"role": "user", "content": f"prompt {row // SAMPLES}"}] for row in range(rows)]
    sampled.batch.non_tensor_batch["raw_prompt"] = object_array(messages)
    straight, resumed = (learner_of(group, tmp_path, "algorithm.adv_estimator=spo") for group in groups)
    assert not straight.prompt_values.state_dict()
    straight.learn(sampled)
    resumed.load(tmp_path, straight.save(tmp_path))
    learned = [learner.learn(sampled) for learner in (straight, resumed)]
    assert straight.prompt_values.state_dict() == resumed.prompt_values.state_dict()
    advantages = [result.batch.batch["advantages"] for result in learned]
    assert torch.equal(*advantages) and advantages[0].abs().max() > 0
    solved = fields["token_level_scores"].sum(1).view(PROMPTS, SAMPLES).sum(1).double()
    values = (0.9 * 0.5 + solved) / (0.9 + SAMPLES)  # after one step
    torch.testing.assert_close(learned[0].batch.batch["prompt_values"], values.repeat_interleave(SAMPLES))
    earlier = {name: value for name, value in resumed.save(tmp_path).items() if name != "prompt_values"}
    resumed.load(tmp_path, earlier)  # the checkpoint of a version that tracked none
    assert not resumed.prompt_values.state_dict()


def test_a_jagged_batch_is_learned_from_like_a_padded_one(tmp_path) -> None:
    sampled, groups = sampled_batch(), [PlainGroup(), PlainGroup()]
    fields = sampled.batch.batch
    lengths = fields["response_mask"].sum(1).tolist()
    start = {"prompts": 0, "input_ids": 2, "attention_mask": 2, "position_ids": 2}  # columns before the response
    cut = {}
    for name, rows in fields.items():
        widths = [2 if name == "prompts" else start.get(name, 0) + length for length in lengths]
        cut[name] = [row[:width] for row, width in zip(rows, widths, strict=True)]
    tensors = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in cut.items()}
    jagged = DataProto.from_dict(tensors=tensors, non_tensors=dict(sampled.batch.non_tensor_batch))
    jagged.meta_info = dict(sampled.batch.meta_info)
    with raises_with(ValueError, "padded_batch"):
        spread_over_ranks(jagged, [np.arange(len(jagged))], 2)
    expected = learner_of(groups[0], tmp_path).learn(sampled)
    found = learner_of(groups[1], tmp_path).learn(dataclasses.replace(sampled, batch=jagged))
    assert found.metrics == expected.metrics
    torch.testing.assert_close(found.batch.batch["advantages"], expected.batch.batch["advantages"])
    first, second = (group.updated[0].batch for group in groups)
    assert all(torch.equal(first[name], second[name]) for name in ("response_mask", "attention_mask", "advantages"))


def test_phases_add_up_and_an_error_for_want_of_memory_says_what_to_change() -> None:
    timer = PhaseTimer({"ref": "lower x"})
    for _ in range(2):
        with timer.phase("adv"):
            pass
    with pytest.raises(RuntimeError) as caught, timer.phase("ref"):
        raise RuntimeError("CUDA out of memory")
    assert any("'ref'" in note and "lower x" in note for note in caught.value.__notes__)
    with pytest.raises(RuntimeError) as other, timer.phase("ref"):
        raise RuntimeError("something else")
    assert not hasattr(other.value, "__notes__") and timer.seconds.keys() == {"adv", "ref"}


def test_a_killed_worker_is_short_of_memory_only_where_that_is_known() -> None:
    """The text of its error names the out-of-memory killer as one of the possible causes."""
    timer = PhaseTimer({"ref": "lower x"})
    for known in (False, True):
        error = WorkerDiedError("killed from outside (SIGKILL), by the out-of-memory killer or by a user")
        error.out_of_memory = known
        with pytest.raises(WorkerDiedError) as caught, timer.phase("ref"):
            raise error
        assert hasattr(caught.value, "__notes__") == known
