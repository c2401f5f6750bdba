"""The sampler with rollouts and rewards of the test's own: what it hands out, asks for and refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from raising import raises_with
from sampler_tools import OwnRollout, prompts_of, reward, same, sampler_of

from hybridrl.errors import RewardError, RolloutError
from hybridrl.protocol import DataProto
from hybridrl.reward import RewardManager
from hybridrl.scored import Unscored
from hybridrl.trainer.failed_batches import FailedBatches
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.early_scores import EarlyScores
from hybridrl.trainer.ppo.responses import respond
from hybridrl.trainer.ppo.sampler import Sampler


def test_what_a_rollout_returns_is_kept_and_what_prompts_carry_reaches_it() -> None:
    def with_turns(answer: DataProto, prompts: DataProto) -> DataProto:
        answer.non_tensor_batch["turns"] = np.array([1, 2, 3], dtype=object)
        answer.non_tensor_batch["extra_info"] = np.array([{"tool": row["row"]} for row in objects["extra_info"]])
        return answer

    prompts = prompts_of(["a", "b", "c"])
    objects = prompts.non_tensor_batch
    rollout = OwnRollout(with_turns)
    answer = respond(rollout, prompts, 0.5, global_steps=7, validate=True, top_p=0.3)
    (asked,) = rollout.asked
    assert asked.non_tensor_batch.keys() == objects.keys()
    assert asked.non_tensor_batch["raw_prompt"][1] == [{"role": "user", "content": "1"}]
    assert asked.meta_info == {"global_steps": 7, "validate": True, "top_p": 0.3}
    found = answer.non_tensor_batch
    assert found["turns"].tolist() == [1, 2, 3]
    assert found["extra_info"].tolist() == [{"tool": 0}, {"tool": 1}, {"tool": 2}]
    assert found["uid"].tolist() == ["a", "b", "c"] and found["raw_prompt"][2][0]["content"] == "2"
    assert answer.meta_info == {"temperature": 0.5}
    assert objects["extra_info"][1] == {"row": 1}  # the prompts are as they were


def test_a_rollout_may_return_other_rows_in_another_order() -> None:
    """Prompt a's second sample took three rows, b's first was answered last."""
    order = [3, 1, 1, 1, 0, 2]

    def sessions(answer: DataProto, prompts: DataProto) -> DataProto:
        return answer.select_idxs(order)

    answer = respond(OwnRollout(sessions), prompts_of(["a", "b"], samples=2), 1.0)
    found = answer.non_tensor_batch
    assert found["uid"].tolist() == ["b", "a", "a", "a", "a", "b"]
    assert found["sample"].tolist() == [1, 1, 1, 1, 0, 0]
    assert [info["row"] for info in found["extra_info"]] == order
    assert (answer.batch["prompts"][:, 0] - 1).tolist() == order


@pytest.mark.parametrize(
    ("rows", "uids", "named"),
    [
        ([0, 1], None, "returned 2 rows for 3.*'uid'"),
        ([0, 1], ["a", "b"], r"without an answer.*c"),
        ([0, 1, 2], ["a", "b", "z"], r"not asked for.*z"),
    ],
)
def test_a_rollout_that_loses_or_invents_rows_is_refused(rows, uids, named) -> None:
    def change(answer: DataProto, prompts: DataProto) -> DataProto:
        answer = answer.select_idxs(rows)
        answer.non_tensor_batch = {} if uids is None else {"uid": np.array(uids, dtype=object)}
        return answer

    with pytest.raises(RolloutError, match=named):
        respond(OwnRollout(change), prompts_of(["a", "b", "c"]), 1.0)


def test_batches_come_one_after_the_other_with_their_metrics() -> None:
    rollout = OwnRollout(same)
    sampler = sampler_of(rollout, "data.gen_batch_size=2")
    first, second, third = (sampler.next() for _ in range(3))
    uids = [list(dict.fromkeys(sampled.batch.non_tensor_batch["uid"])) for sampled in (first, second, third)]
    assert uids == [["0-0", "0-1", "0-2"], ["0-3", "0-4", "0-5"], ["0-6", "0-7", "0-8"]]
    assert first.metrics["reward/timeouts"] == 2.0 and second.metrics["reward/timeouts"] == 1.0  # a call is a timeout
    assert second.metrics["filter_groups/carried_over"] == 1.0
    assert first.timing.keys() == {"data", "gen", "reward"} and first.reward_columns == ("acc",)
    # those of a generation batch belong to the step that trains on the first of them: a surplus is not counted twice
    rows = [[group.row for group in sampled.groups] for sampled in (first, second, third)]
    assert rows == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert all(group.mixed and group.mean == pytest.approx(group.row + 1.005) for group in first.groups)
    assert [asked.meta_info["global_steps"] for asked in rollout.asked] == [1, 1, 2, 3, 3]
    scores = first.batch.batch["token_level_scores"].sum(1)
    torch.testing.assert_close(scores, torch.tensor([1.0, 1.01, 2.0, 2.01, 3.0, 3.01]))
    assert first.batch.non_tensor_batch["acc"].tolist() == [0, 1] * 3
    assert [info["index"] for info in first.batch.non_tensor_batch["extra_info"]] == [0, 0, 1, 1, 2, 2]


def test_greedy_baselines_find_their_rows_by_uid() -> None:
    def backwards(answer: DataProto, prompts: DataProto) -> DataProto:
        return answer.select_idxs(list(range(len(prompts)))[::-1])

    rollout = OwnRollout(backwards)
    sampled = sampler_of(rollout, "algorithm.adv_estimator=remax").next()
    assert sampled.batch.batch["prompts"][:, -1].tolist() == [3, 3, 2, 2, 1, 1]
    assert sampled.batch.batch["reward_baselines"].tolist() == [3, 3, 2, 2, 1, 1]
    assert sampled.metrics["critic/reward_baselines/mean"] == 2.0 and "gen_max" in sampled.timing
    assert rollout.asked[1].meta_info["do_sample"] is False


def test_a_sampler_continues_from_its_state(tmp_path) -> None:
    words = ["data.gen_batch_size=2"]
    whole, cut = sampler_of(OwnRollout(same), *words), sampler_of(OwnRollout(same), *words)
    whole.next(), cut.next()
    state = cut.save(tmp_path)
    resumed = sampler_of(OwnRollout(same), *words)
    resumed.load(tmp_path, state)
    resumed.step = 1
    for _ in range(2):
        expected, found = whole.next(), resumed.next()
        assert found.batch.non_tensor_batch["uid"].tolist() == expected.batch.non_tensor_batch["uid"].tolist()
        assert torch.equal(found.batch.batch["responses"], expected.batch.batch["responses"])
        assert found.metrics == expected.metrics and found.reward_columns == expected.reward_columns
        assert found.groups == expected.groups != ()
    assert resumed.step == whole.step == 3


def test_the_first_batch_brings_a_probe_where_sampling_is_truncated() -> None:
    words = ["algorithm.rollout_correction.probe_threshold=1e-3"]
    plain = sampler_of(OwnRollout(same), *words)
    assert plain.next().probe is None

    def with_column(answer: DataProto, prompts: DataProto) -> DataProto:
        answer.non_tensor_batch["of_the_answer"] = np.array([1] * len(answer), dtype=object)
        return answer

    rollout = OwnRollout(with_column)
    truncated = sampler_of(rollout, *words, "actor_rollout_ref.rollout.top_k=2")
    first, second = truncated.next(), truncated.next()
    assert first.probe is not None and second.probe is None
    assert first.probe.batch["prompts"].tolist() == first.batch.batch["prompts"].tolist()
    assert rollout.asked[1].meta_info["top_k"] == -1
    assert rollout.asked[1].non_tensor_batch.keys() == rollout.asked[0].non_tensor_batch.keys()


def test_prompts_that_lost_samples_are_replaced_from_the_data() -> None:
    """Every sample of the first prompt fails: a further generation batch fills the step."""

    def failing(batch: DataProto, return_dict: bool = False):
        result = reward(batch, return_dict)
        result["failed"] = [uid == "0-0" for uid in batch.non_tensor_batch["uid"]]
        return result

    sampler = sampler_of(OwnRollout(same), "reward.on_error=drop")
    sampler.reward_fn = failing  # type: ignore[assignment]
    first = sampler.next()
    assert list(dict.fromkeys(first.batch.non_tensor_batch["uid"])) == ["0-1", "0-2", "0-3"]
    assert first.metrics["reward/acc/mean"] == 0.5


def test_prompts_whose_greedy_baseline_failed_are_not_trained_on() -> None:
    """Their advantage would be the whole score."""

    def failing(batch: DataProto, return_dict: bool = False):
        result = reward(batch, return_dict=True)
        is_greedy = len(batch) == len(set(batch.non_tensor_batch["uid"]))
        result["failed"] = [is_greedy and uid == "0-1" for uid in batch.non_tensor_batch["uid"]]
        result["metrics"]["reward/errors"] = float(sum(result["failed"]))
        return result if return_dict else result["reward_tensor"]

    sampler = sampler_of(OwnRollout(same), "reward.on_error=drop", "algorithm.adv_estimator=remax")
    sampler.reward_fn = failing  # type: ignore[assignment]
    first = sampler.next()
    assert list(dict.fromkeys(first.batch.non_tensor_batch["uid"])) == ["0-0", "0-2", "0-3"]
    assert first.batch.batch["reward_baselines"].tolist() == [1, 1, 3, 3, 4, 4]
    assert first.metrics["reward/errors"] == 1 and first.metrics["reward/timeouts"] == 4  # two calls per batch

    sampler = sampler_of(OwnRollout(same), "reward.on_error=zero", "algorithm.adv_estimator=remax")
    sampler.reward_fn = failing  # type: ignore[assignment]
    assert list(dict.fromkeys(sampler.next().batch.non_tensor_batch["uid"])) == ["0-0", "0-1", "0-2"]


def test_a_manager_that_does_not_say_what_failed_is_refused_where_that_matters() -> None:
    with raises_with(RewardError, "reward.on_error=drop"):
        sampler_of(OwnRollout(same), "reward.on_error=drop").next()


def test_prompts_whose_scoring_failed_are_answered_again(tmp_path) -> None:
    """By the same sampler, and by one that resumes; with the prompt that waited."""
    ends = iter([RewardError("not yet")])

    def failing(batch: DataProto, return_dict: bool = False):
        if len(rollout.asked) == 3:
            for error in ends:
                raise error
        return reward(batch, return_dict)

    words = ["data.gen_batch_size=2"]
    whole = sampler_of(OwnRollout(same), *words)
    whole.next()
    expected = [whole.next() for _ in range(2)]
    rollout = OwnRollout(same)
    sampler = sampler_of(rollout, *words)
    sampler.reward_fn = failing  # type: ignore[assignment]
    sampler.next()
    sampler.release()
    with pytest.raises(RewardError, match="not yet"):
        sampler.next()
    resumed = sampler_of(OwnRollout(same), *words)
    resumed.load(tmp_path, sampler.save(tmp_path))
    for again in (sampler, resumed):
        for batch in expected:
            sampled = again.next().batch
            assert sampled.non_tensor_batch["uid"].tolist() == batch.batch.non_tensor_batch["uid"].tolist()
            assert torch.equal(sampled.batch["token_level_scores"], batch.batch.batch["token_level_scores"])
        assert again.step == 3
        assert [asked.meta_info["global_steps"] for asked in again.rollout.asked][-3:] == [2, 3, 3]


def test_the_batch_that_could_not_be_scored_is_kept_and_named_in_the_error(tmp_path) -> None:
    """The second batch: the first was scored. Another error than that of a reward leaves nothing."""
    sampler = sampler_of(OwnRollout(same))
    sampler.failed_batches, answered = FailedBatches(tmp_path), sampler.rollout.asked

    def failing(error: Exception):
        def score(batch, return_dict=False):
            if len(answered) > 1:
                raise error
            return reward(batch, return_dict)

        return score

    sampler.reward_fn = failing(RewardError("not yet"))
    sampler.next()
    with pytest.raises(RewardError, match="not yet") as caught:
        sampler.next()
    kept = tmp_path / "failed_batch_step_2"
    assert list(tmp_path.iterdir()) == [kept] and str(kept) in caught.value.__notes__[0]
    uids = [batch.non_tensor_batch["uid"].tolist() for batch in (DataProto.load_from_disk(kept), answered[1])]
    assert uids[0] == uids[1]
    sampler.reward_fn = failing(RolloutError("gone"))
    with pytest.raises(RolloutError):
        sampler.next()
    assert list(tmp_path.iterdir()) == [kept]


class OwnPhases(Sampler):
    """Generates the rows backwards, and scores by the length of responses, without the reward function."""

    def generate(self, samples: DataProto, *others: Any, **settings: Any) -> DataProto:
        return super().generate(samples.select_idxs(list(range(len(samples)))[::-1]), *others, **settings)

    def score(self, batch: DataProto, timer: PhaseTimer, reward_fn: RewardManager | EarlyScores) -> dict[str, Any]:
        lengths = batch.batch["response_mask"].sum(dim=-1)
        rewards = torch.zeros(batch.batch["responses"].shape)
        rewards[:, 0] = lengths
        missing = [Unscored("grading", "too short") if length == 1 else None for length in lengths]
        return {"reward_tensor": rewards, "reward_extra_info": {"length": lengths.tolist()}, "missing": missing}


def test_phases_of_a_subclass_take_the_place_of_ours() -> None:
    """Two generation batches per step, and samples without a score, which are generated again."""
    sampler = sampler_of(rollout := OwnRollout(same), "data.gen_batch_size=2", kind=OwnPhases)
    for _ in range(2):
        sampled = sampler.next()
        batch = sampled.batch
        lengths = batch.batch["response_mask"].sum(dim=-1)
        assert batch.batch["token_level_scores"].sum(dim=-1).tolist() == lengths.tolist() and lengths.min() > 1
        assert batch.non_tensor_batch["length"].tolist() == lengths.tolist()
        assert sampled.reward_columns == ("length",) and sampled.metrics["missing/grading"] > 0
    assert rollout.asked[0].non_tensor_batch["uid"].tolist() == ["0-1", "0-1", "0-0", "0-0"]
    baselines = sampler_of(OwnRollout(same), "algorithm.adv_estimator=remax", kind=OwnPhases).next()
    assert baselines.batch.batch["reward_baselines"].min() > 1, "greedy responses are scored by it, too"


def test_what_a_phase_of_a_subclass_forgets_is_named() -> None:
    class Nothing(OwnPhases):
        def score(self, *arguments: Any) -> dict[str, Any]:
            return {}

    with raises_with(RewardError, "Sampler.score", "'reward_tensor'"):
        sampler_of(OwnRollout(same), kind=Nothing).next()
    with raises_with(RewardError, "reward.on_error=drop", "'failed'"):
        sampler_of(OwnRollout(same), "reward.on_error=drop", kind=OwnPhases).next()


@pytest.mark.parametrize("method", ["pause", "unpause", "abort"])
def test_a_rollout_without_what_no_trainer_calls_says_so(method: str) -> None:
    rollout = OwnRollout(same)
    assert rollout.health() == []
    with raises_with(RolloutError, "OwnRollout", f"{method}()"):
        getattr(rollout, method)()
