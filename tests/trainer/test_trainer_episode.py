"""An episode ends with the same group, whatever fails on the way and whichever episode finishes first."""

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_tools import PAD, prompts_of

from hybridrl.config import load_config
from hybridrl.protocol import DataProto
from hybridrl.protocol.sample_names import SampleName, UnscoredSample, sample_names
from hybridrl.rollout.batch import batch_of
from hybridrl.rollout.trajectory import Trajectory
from hybridrl.scored import Reason, Unscored
from hybridrl.trainer.ppo.episode import Episode, EpisodeBatch, ScoredGroup, join_groups
from hybridrl.trainer.ppo.missing import MissingPolicy

Faults = Mapping[tuple[str, int, int], tuple[str, bool]]  # uid, sample, attempt -> reason, whether the rollout gives it
Row = tuple[SampleName, list[int], float]  # with its tokens and its score
LARGEST_WIDTH = 5


def tokens_of(name: SampleName, attempt: int) -> list[int]:
    """The response to an attempt at a sample: between 1 and 5 tokens."""
    number = crc32(f"{name} {attempt}".encode())
    return [number % 97 + place for place in range(number % LARGEST_WIDTH + 1)]


def policy_with(max_refills: int, estimator: str = "grpo") -> MissingPolicy:
    words = [f"algorithm.adv_estimator={estimator}", f"algorithm.missing.max_refills={max_refills}"]
    words += ["actor_rollout_ref.rollout.n=4", "algorithm.missing.max_share=1.0"]
    return MissingPolicy(load_config("ppo_trainer", words), PAD)


def answered(rows: DataProto, attempt: int, faults: Faults) -> tuple[DataProto, dict[str, Any]]:
    """The answer to the rows, each response as wide as it is alone, and its rewards."""
    names, fault_of = list(sample_names(rows)), {}
    for name in names:
        if (name.uid, name.sample, attempt) in faults:
            fault_of[name] = faults[name.uid, name.sample, attempt]
    present = [name for name in names if not fault_of.get(name, ("", False))[1]]
    trajectories = []
    for name in present:
        tokens = tokens_of(name, attempt)
        zeros = [0.0] * len(tokens)
        trajectories.append(Trajectory(*name, [1, 2], tokens, [1] * len(tokens), zeros, [(0, len(tokens))]))
    answer = batch_of(trajectories, PAD, prompt_width=2, response_width=LARGEST_WIDTH)
    answer.meta_info["missing_samples"] = [
        UnscoredSample(*name, Unscored(reason, "gone")) for name, (reason, early) in fault_of.items() if early
    ]
    rewards = torch.zeros(answer.batch["responses"].shape)
    rewards[:, 0] = torch.tensor([float(sum(tokens_of(name, attempt))) for name in present])
    missing = [Unscored(fault_of[name][0]) if name in fault_of else None for name in present]
    columns = {"attempt": [attempt] * len(present)}
    return answer, {"reward_tensor": rewards, "missing": missing, "reward_extra_info": columns}


def step(episodes: EpisodeBatch, faults: Faults) -> None:
    """One attempt at what waits."""
    assert episodes.rows is not None
    answer, rewards = answered(episodes.rows, episodes.attempt, faults)
    episodes.add(answer, rewards if len(answer) else None)


def rows_in(batch: DataProto) -> list[Row]:
    """The rows of a batch without padding: sample, tokens, score."""
    lengths = batch.batch["response_mask"].sum(dim=-1).tolist()
    rows = zip(sample_names(batch), batch.batch["responses"].tolist(), lengths, strict=True)
    scores = batch.batch["token_level_scores"].sum(dim=-1).tolist()
    return [(name, ids[:length], score) for (name, ids, length), score in zip(rows, scores, strict=True)]


def expected_group(uid: str, samples: int, max_refills: int, faults: Faults) -> list[Row]:
    """The rows of a prompt by definition: of each sample, the first attempt with a score, unless it was dropped."""
    rows = []
    for name in (SampleName(uid, number) for number in range(samples)):
        for attempt in range(max_refills + 1):
            reason = faults.get((*name, attempt), (None, False))[0]
            if reason is None:
                tokens = tokens_of(name, attempt)
                rows.append((name, tokens, float(sum(tokens))))
            if reason is None or reason == "dropped":
                break
    return rows


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[list[str], int, int, Faults, Sequence[int]]:
    uids = [f"0-{number}" for number in range(draw(st.integers(1, 3)))]
    samples, max_refills = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    fault = st.one_of(st.none(), st.tuples(st.sampled_from(["infra", "timeout", "dropped"]), st.booleans()))
    names = [(uid, sample, attempt) for uid in uids for sample in range(samples) for attempt in range(max_refills + 1)]
    faults = {name: chance for name in names if (chance := draw(fault)) is not None}
    return uids, samples, max_refills, faults, draw(st.permutations(list(range(len(uids))) * (max_refills + 1)))


@given(scenarios())
@settings(max_examples=60, deadline=None)
def test_a_group_depends_neither_on_other_episodes_nor_on_the_order_of_finishing(scenario) -> None:
    uids, samples, max_refills, faults, order = scenario
    policy = policy_with(max_refills)
    together = EpisodeBatch(policy, prompts_of(uids, samples))
    while together.rows is not None:
        step(together, faults)
    alone = [EpisodeBatch(policy, prompts_of([uid], samples)) for uid in uids]
    for number in order:
        if alone[number].rows is not None:
            step(alone[number], faults)
    for uid, own in zip(uids, alone, strict=True):
        rows = expected_group(uid, samples, max_refills, faults)
        for episode in (together.episodes[uid], own.episodes[uid]):
            assert not episode.waiting
            assert set(episode.left_out) == {SampleName(uid, n) for n in range(samples)} - {row[0] for row in rows}
            scored, outcome = episode.scored, episode.outcome
            assert ([] if scored is None else rows_in(join_groups([scored], PAD))) == rows
            too_few = bool(episode.left_out) and len(rows) < policy.smallest_group
            assert isinstance(outcome, Unscored) == (too_few or not rows)
            if isinstance(outcome, Unscored):
                assert outcome in episode.left_out.values()
    groups = [group for own in alone if (group := own.episodes[own.prompts.non_tensor_batch["uid"][0]].scored)]
    batch = together.batch
    assert (batch is None) == (not groups)
    if batch is not None:
        assert rows_in(join_groups(groups, PAD)) == rows_in(batch)
        whole = {uid for uid, episode in together.episodes.items() if isinstance(episode.outcome, ScoredGroup)}
        trainable = together.trainable()
        rows = [row for row in rows_in(batch) if row[0].uid in whole]
        assert ([] if trainable is None else rows_in(trainable)) == rows
    assert sum(own.left_out for own in alone) == together.left_out
    assert sorted(map(str, together.attempts)) == sorted(str(attempt) for own in alone for attempt in own.attempts)


def test_an_episode_of_samples_that_all_fail_ends_with_the_first_reason() -> None:
    names = [SampleName("a", 0), SampleName("a", 1)]
    episode = Episode(names, max_refills=1)
    answer = DataProto.from_dict(tensors={"responses": torch.zeros(0, 1)})
    lost = [UnscoredSample("a", 0, Unscored("timeout", "slow"), action="refill")]
    lost.append(UnscoredSample("a", 1, Unscored("dropped"), action="drop"))
    episode.add(answer, [], lost)
    assert episode.waiting == (names[0],) and episode.attempt == 1 and list(episode.left_out) == [names[1]]
    with pytest.raises(AssertionError):
        _ = episode.outcome
    episode.add(answer, [], lost[:1])
    assert episode.scored is None and isinstance(episode.outcome, Unscored)
    assert episode.outcome.reason is Reason.DROPPED and set(episode.left_out) == set(names)


def test_the_batch_of_one_answer_is_that_answer() -> None:
    """Nothing is copied where no sample is missing: the rows of 512 prompts with 16 samples stay where they are."""
    episodes = EpisodeBatch(policy_with(1), prompts_of(["a", "b"], 2))
    assert episodes.rows is not None
    answer, rewards = answered(episodes.rows, 0, {})
    episodes.add(answer, rewards)
    assert episodes.batch is answer and episodes.trainable() is answer


def test_names_are_computed_once_for_the_same_columns() -> None:
    batch = prompts_of(["a", "b"], 2)
    names = sample_names(batch)
    assert names == [("a", 0), ("a", 1), ("b", 0), ("b", 1)] and sample_names(batch) is names
    batch.non_tensor_batch["sample"] = np.array([3, 2, 1, 0], dtype=object)
    assert [name.sample for name in sample_names(batch)] == [3, 2, 1, 0]
    del batch.non_tensor_batch["sample"]
    assert [name.sample for name in sample_names(batch)] == [0, 1, 2, 3], "every row is a sample of its own"
    assert sample_names(batch.select_idxs([2])) == [("b", 0)]
