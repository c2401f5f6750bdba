"""Samples in several rows: whatever a session is cut into, its tokens are rewarded, compared and weighted as before."""

from dataclasses import dataclass
from functools import cache
from math import exp
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with
from sampler_tools import PAD, OwnRollout, prompts_of
from transformers import AutoTokenizer

from hybridrl.algorithms.aggregation import LOSS_AGG_MODES
from hybridrl.algorithms.sessions import sessions_of
from hybridrl.config import PPOTrainerConfig, load_config
from hybridrl.config.roles import ROLES
from hybridrl.errors import AlgorithmError
from hybridrl.observe.step_metrics import compute_data_metrics
from hybridrl.protocol import DataProto
from hybridrl.trainer.failed_batches import FailedBatches
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.batching import epochs_of_mini_batches, spread_over_ranks
from hybridrl.trainer.ppo.learner import Learner
from hybridrl.trainer.ppo.missing import MissingPolicy
from hybridrl.trainer.ppo.role_scores import Scorer
from hybridrl.trainer.ppo.samples import Samples
from hybridrl.trainer.ppo.validation import validate
from hybridrl.workers.losses import LossCounts, policy_loss_fn, value_loss_fn

LIMIT = 16  # of response tokens
MICRO = 3  # rows of a micro-batch
PLAIN = ("algorithm.adv_estimator=grpo", f"data.max_response_length={LIMIT}", "actor_rollout_ref.rollout.n=2")


@dataclass(frozen=True)
class Session:
    """A sample of a prompt: the generated tokens of each of its turns, where it is cut, and its reward."""

    prompt: int
    turns: tuple[int, ...]
    cuts: tuple[bool, ...]
    reward: float

    @property
    def parts(self) -> list[list[int]]:
        """The turns of each row."""
        parts: list[list[int]] = [[]]
        for turn, cut in zip(self.turns, self.cuts, strict=True):
            if parts[-1] and cut:
                parts.append([])
            parts[-1].append(turn)
        return parts


turn = st.integers(1, 4)
session = st.integers(1, 3).flatmap(
    lambda count: st.tuples(
        st.tuples(*[turn] * count), st.tuples(*[st.booleans()] * count), st.sampled_from([0.0, 0.25, 1.0, -2.0])
    )
)
groups = st.lists(st.lists(session, min_size=2, max_size=4), min_size=1, max_size=4).map(
    lambda prompts: [Session(number, *one) for number, prompt in enumerate(prompts) for one in prompt]
)


def batch_of(sessions: list[Session]) -> DataProto:
    """A row for each part: its turns with an answer of a tool between them; the reward is that of the last part."""
    rows, uids, names, order, samples = [], [], [], [], []
    for number, one in enumerate(sessions):
        for part, turns in enumerate(one.parts):
            mask = [entry for length in turns for entry in [*[1] * length, 0]][:-1]
            last = part == len(one.parts) - 1
            rows.append((mask, one.reward if last else 0.0))
            uids.append(f"p{one.prompt}")
            names.append(f"sample {number}")
            samples.append(number)
            order.append(part)
    width = max(len(mask) for mask, _ in rows)
    mask = torch.tensor([entries + [0] * (width - len(entries)) for entries, _ in rows])
    attention = torch.tensor([[1] * len(entries) + [0] * (width - len(entries)) for entries, _ in rows])
    scores = torch.zeros(len(rows), width)
    for row, (entries, reward) in enumerate(rows):
        scores[row, len(entries) - 1] = reward
    zeros = torch.zeros(len(rows), width)
    return DataProto.from_dict(
        tensors={
            "prompts": torch.ones(len(rows), 2, dtype=torch.int64),
            "responses": torch.ones_like(mask),
            "attention_mask": torch.cat([torch.ones(len(rows), 2, dtype=torch.int64), attention], 1),
            "response_mask": mask,
            "token_level_scores": scores,
            "old_log_probs": zeros,
            "values": zeros,
            "returns": zeros + 1,
            "key": torch.arange(len(rows)),
        },
        non_tensors={
            "uid": np.array(uids, dtype=object),
            "sample": np.array(samples, dtype=object),
            "session_id": np.array(names, dtype=object),
            "trajectory_index": np.array(order, dtype=object),
        },
        meta_info={},
    )


def gradients(batch: DataProto, loss_fn: Any, output: str, ranks: int, per_mini: int) -> torch.Tensor:
    """Of the losses of all mini-batches with respect to one number per token, [B, T]; row by row, on each rank."""
    leaf = torch.zeros_like(batch.batch["old_log_probs"], requires_grad=True)
    sessions = sessions_of(batch)
    (mini_batches,) = epochs_of_mini_batches(batch.non_tensor_batch["uid"], per_mini, 1, False, 0)
    ids = None if sessions is None else sessions.groups.ids.numpy()
    spread, planned = spread_over_ranks(batch, mini_batches, ranks, sessions=ids)
    for rank, shard in enumerate(spread.chunk(ranks)):
        start = 0
        for mini in planned:
            for row in range(start, start + mini.rows, MICRO):
                one = shard[row : min(row + MICRO, start + mini.rows)]
                outputs = {output: leaf[one.batch["key"]]}
                loss, _ = loss_fn(outputs, one, LossCounts(mini.tokens, mini.sequences, LIMIT))
                loss.backward()
            start += mini.rows
        assert start == len(shard), rank
    assert leaf.grad is not None
    return leaf.grad


def by_hand(sessions: list[Session], mode: str, per_mini: int) -> list[float]:
    """Minus advantage times weight of a token of each session, from the sessions alone."""
    prompts = list(dict.fromkeys(one.prompt for one in sessions))
    found = []
    for one in sessions:
        peers = [other.reward for other in sessions if other.prompt == one.prompt]
        advantage = (one.reward - mean(peers)) / (stdev(peers) + 1e-6)
        place = prompts.index(one.prompt) // per_mini
        mini = [other for other in sessions if prompts.index(other.prompt) // per_mini == place]
        tokens, count = sum(sum(other.turns) for other in mini), len(mini)
        weight = {
            "token-mean": 1 / tokens,
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / count,
            "seq-mean-token-sum-norm": 1 / count / LIMIT,
            "seq-mean-token-mean": 1 / count / sum(one.turns),
        }[mode]
        found.append(-advantage * weight)
    return found


@cache
def config_of(*words: str) -> PPOTrainerConfig:
    return load_config("ppo_trainer", [*PLAIN, *words])


def learner_of(*words: str) -> Learner:
    return Learner(config_of(*words), {"actor_rollout": None}, FailedBatches(None))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=15)
@given(sessions=groups, ranks=st.integers(1, 3), per_mini=st.integers(1, 3))
def test_each_token_has_the_gradient_that_the_uncut_session_gives_it(mode, sessions, ranks, per_mini) -> None:
    words = f"actor_rollout_ref.actor.loss_agg_mode={mode}"
    batch = batch_of(sessions)
    learner_of(words).estimate_advantages(batch, PhaseTimer())
    loss_fn = policy_loss_fn(config_of(words).actor_rollout_ref.actor)
    found = gradients(batch, loss_fn, "log_probs", ranks, per_mini)
    mask = batch.batch["response_mask"].bool()
    assert torch.all(found[~mask] == 0)
    wanted = by_hand(sessions, mode, per_mini)
    for row, number in enumerate(batch.non_tensor_batch["sample"]):
        torch.testing.assert_close(found[row][mask[row]], torch.full((int(mask[row].sum()),), wanted[number]))


@settings(max_examples=15)
@given(sessions=groups, ranks=st.integers(1, 2))
def test_the_critic_weighs_sessions_alike(sessions, ranks) -> None:
    config = config_of("critic.loss_agg_mode=seq-mean-token-mean")
    batch = batch_of(sessions)
    found = gradients(batch, value_loss_fn(config.critic), "values", ranks, per_mini=len(sessions))
    mask = batch.batch["response_mask"].bool()
    for row, number in enumerate(batch.non_tensor_batch["sample"]):
        wanted = -1 / len(sessions) / sum(sessions[number].turns)  # of 1/2 (V - 1)^2 at V = 0
        torch.testing.assert_close(found[row][mask[row]], torch.full((int(mask[row].sum()),), wanted))


@settings(max_examples=15)
@given(sessions=groups)
def test_scores_are_normalised_and_reported_by_session(sessions) -> None:
    batch = batch_of(sessions)
    learner = learner_of("algorithm.normalize_rewards=batch", "algorithm.clip_rewards=1.5")
    learner.estimate_advantages(batch, PhaseTimer())
    rewards = [one.reward for one in sessions]
    centre, scale = mean(rewards), stdev(rewards) + 1e-6
    wanted = [max(-1.5, min(1.5, (reward - centre) / scale)) for reward in rewards]
    sums = batch.batch["token_level_rewards"].sum(-1)
    found = [0.0] * len(sessions)
    for row, number in enumerate(batch.non_tensor_batch["sample"]):
        found[number] += float(sums[row])
    assert found == pytest.approx(wanted, abs=1e-4)
    metrics = compute_data_metrics(batch, use_critic=False)
    assert metrics["critic/score/mean"] == pytest.approx(centre, abs=1e-5)
    assert metrics["critic/score/max"] == max(rewards) and metrics["critic/rewards/min"] == pytest.approx(min(wanted))


@settings(max_examples=15)
@given(sessions=groups, seed=st.integers(0, 99))
def test_the_rollout_correction_weighs_and_rejects_sessions(sessions, seed) -> None:
    """A weight is the product over all rows of a session, and a session is rejected as a whole."""
    batch = batch_of(sessions)
    mask, numbers = batch.batch["response_mask"].bool(), batch.non_tensor_batch["sample"]
    drawn = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed)) / 4
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"] - drawn
    keys = {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1"}
    words = [f"algorithm.rollout_correction.{key}={value}" for key, value in keys.items()]
    metrics = learner_of(*words, "algorithm.rollout_correction.probe_threshold=null").correct(batch, None, PhaseTimer())
    rejected = 0
    for number, one in enumerate(sessions):
        rows = [row for row, sample in enumerate(numbers) if sample == number]
        ratios = [float(x) for row in rows for x in drawn[row][mask[row]]]
        assert len(ratios) == sum(one.turns)
        kept = 0.9 <= exp(-mean(ratios)) <= 1.1
        rejected += not kept
        for row in rows:
            weights, trained = (batch.batch[name][row] for name in ("rollout_is_weights", "trained_mask"))
            torch.testing.assert_close(weights, mask[row] * min(exp(sum(ratios)), 2.0))
            assert torch.equal(trained.bool(), mask[row] & kept)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(rejected / len(sessions))


CUT = [Session(0, (2, 1), (False, True), 1.0), Session(0, (3,), (False,), 0.0)]


def test_what_draws_single_rows_refuses_cut_sessions() -> None:
    batch = batch_of(CUT)
    learner = learner_of("algorithm.use_pf_ppo=True")
    learner.estimate_advantages(batch, PhaseTimer())
    with raises_with(AlgorithmError, "algorithm.use_pf_ppo=True"):
        learner.update(batch, PhaseTimer())


def test_a_role_without_sequences_refuses_cut_sessions() -> None:
    batch = batch_of(CUT)
    learner = learner_of()
    learner.groups = {"prime": SimpleNamespace(dp_size=lambda mesh: 1)}  # type: ignore[dict-item]
    spec = ROLES["prime"]
    assert spec.update is not None
    with pytest.raises(AlgorithmError, match="role prime learns from one response per sample"):
        next(learner.update_batches(batch, spec, spec.update))


def test_validation_has_one_answer_for_a_session(micro_model: Path) -> None:
    """Its score is that of all its trajectories; the columns are those of the last one, where it was scored."""
    tokenizer = AutoTokenizer.from_pretrained(micro_model)
    batch = batch_of(CUT)
    letters = tokenizer("123", add_special_tokens=False)["input_ids"]
    batch.batch["responses"] *= torch.tensor(letters)[:, None]
    batch.non_tensor_batch["data_source"] = np.array(["s"] * 3, dtype=object)
    rewards = torch.zeros(3, batch.batch["responses"].shape[1])
    rewards[:, 0] = torch.tensor([0.5, 1.0, 0.0])
    config = load_config("ppo_trainer", [*PLAIN, "actor_rollout_ref.rollout.val_kwargs.n=2"])
    scored = {"reward_tensor": rewards, "reward_extra_info": {"acc": [None, 1.0, 0.0]}, "metrics": {}}
    samples = Samples(tokenizer)
    metrics = validate(
        [prompts_of(["p0"])],
        OwnRollout(lambda answer, prompts: batch),
        lambda batch, return_dict: scored,  # type: ignore[arg-type]
        config.actor_rollout_ref.rollout,
        1,
        samples,
        MissingPolicy(config, PAD),
    )
    assert samples.outputs == ["2", "333"] and samples.uids == ["p0", "p0"]
    assert samples.scores == [1.5, 0.0] and samples.extra == {"acc": [1.0, 0.0]}
    assert metrics["val-aux/s/reward/mean@2"] == 0.75 and metrics["val-core/s/acc/mean@2"] == 0.5


def test_a_role_scores_a_session_once() -> None:
    """The score of a model is added where the session ends, whatever the order of its rows."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]])
    columns = {"uid": ["a"] * 4, "session_id": ["s", "t", "s", "s"], "trajectory_index": [2, 0, 0, 1]}
    batch = DataProto.from_dict(
        tensors={"responses": mask, "response_mask": mask},
        non_tensors={name: np.array(values, dtype=object) for name, values in columns.items()},
    )
    scorer, scoring = Scorer({}, config_of()), SimpleNamespace(weight=lambda config: 2.0)
    more = torch.tensor([[0.0, 1, 0], [2, 0, 0], [0, 0, 3], [0, 4, 0]])  # where each row ends
    found = scorer.add_scores(torch.zeros(4, 3), scoring, more, batch)  # type: ignore[arg-type]
    assert found.tolist() == [[0, 2, 0], [4, 0, 0], [0, 0, 0], [0, 0, 0]]
