"""Samples without a score: one is generated again alone, or leaves its group, and no other sample notices."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises_with
from sampler_tools import PAD, OwnRollout, prompts_of, reward, same, sampler_of
from transformers import AutoTokenizer

from hybridrl.algorithms import outcome_estimator
from hybridrl.config import ConfigError, load_config, validate
from hybridrl.errors import RewardError, RolloutError
from hybridrl.protocol import DataProto, object_array
from hybridrl.protocol.sample_names import UnscoredSample, sample_names
from hybridrl.registry import ADV_ESTIMATORS
from hybridrl.reward.factory import ask
from hybridrl.rollout.batch import requests_of
from hybridrl.scored import Unscored
from hybridrl.trainer.ppo.batching import join_generated
from hybridrl.trainer.ppo.missing import MissingPolicy
from hybridrl.trainer.ppo.samples import Samples
from hybridrl.trainer.ppo.validation import validate as validate_answers

Missing = Callable[[str, int, int], str | None]  # uid, sample, attempt -> reason


def unjudged(missing: Missing) -> Callable[..., Any]:
    """The reward of `sampler_tools`, without a score where `missing` gives a reason."""

    def judge(batch: DataProto, return_dict: bool = False) -> Any:
        result = reward(batch, return_dict=True)
        attempt = batch.meta_info.get("attempt", 0)
        reasons = [missing(uid, sample, attempt) for uid, sample in sample_names(batch)]
        result["missing"] = [reason and Unscored(reason, "it is gone") for reason in reasons]
        for row, reason in enumerate(reasons):
            if reason is not None:
                result["reward_tensor"][row, 0] = torch.nan
        return result

    return judge


def lost_sessions(missing: Missing) -> Callable[[DataProto, DataProto], DataProto]:
    """What an agent rollout returns: no rows of samples without a score, and the reasons."""

    def change(answer: DataProto, prompts: DataProto) -> DataProto:
        attempt, names = prompts.meta_info.get("attempt", 0), sample_names(answer)
        reasons = [missing(uid, sample, attempt) for uid, sample in names]
        kept = answer.select_idxs([row for row, reason in enumerate(reasons) if reason is None])
        kept.meta_info["missing_samples"] = [
            UnscoredSample(uid, sample, Unscored(reason, "the session died"))
            for (uid, sample), reason in zip(names, reasons, strict=True)
            if reason is not None
        ]
        return kept

    return change


def first_time(*lost: tuple[str, int]) -> Missing:
    return lambda uid, sample, attempt: "infra" if attempt == 0 and (uid, sample) in lost else None


def sampled_with(where: str, missing: Missing, *words: str) -> tuple[Any, OwnRollout]:
    """A sampler whose reward function or whose sessions fail."""
    rollout = OwnRollout(lost_sessions(missing) if where == "session" else same)
    sampler = sampler_of(rollout, *words)
    if where == "reward":
        sampler.reward_fn = unjudged(missing)
    return sampler, rollout


@pytest.mark.parametrize("where", ["session", "reward"])
def test_a_missing_sample_alone_is_generated_again(where, capsys) -> None:
    whole = sampler_of(OwnRollout(same)).next().batch
    sampler, rollout = sampled_with(where, first_time(("0-1", 0), ("0-2", 1)))
    sampled = sampler.next()
    assert [sample_names(asked) for asked in rollout.asked][1:] == [[("0-1", 0), ("0-2", 1)]]
    # counts of both attempts, and of the few samples of the second nothing else
    assert sampled.metrics["reward/timeouts"] == 2 and sampled.metrics["reward/rows"] == (6 if where == "reward" else 4)
    assert [asked.meta_info.get("attempt") for asked in rollout.asked] == [None, 1]
    batch, names = sampled.batch, sample_names(sampled.batch)
    assert names == sample_names(whole)  # every sample stands where it would have stood
    assert "attempt" not in batch.meta_info and "missing_samples" not in batch.meta_info
    for row, name in enumerate(names):
        again = name in [("0-1", 0), ("0-2", 1)]
        assert torch.equal(batch.batch["responses"][row], whole.batch["responses"][row]) != again
        assert batch.non_tensor_batch["extra_info"][row] == whole.non_tensor_batch["extra_info"][row]
    scores = batch.batch["token_level_scores"].sum(1)
    torch.testing.assert_close(scores, torch.tensor([1.0, 1.01, 2.0, 2.01, 3.0, 3.01]))
    found = {name: value for name, value in sampled.metrics.items() if name.startswith("missing/") and value}
    assert found.pop("missing/bias_bound") == pytest.approx(2 / 8 * 2.01)
    assert found == {"missing/infra": 2 / 8, "missing/refilled": 2 / 6}
    told = capsys.readouterr().err
    assert "2 of 6 samples have no reward (infra 2): 2 are generated again" in told
    detail = "the session died" if where == "session" else "it is gone"
    assert f"uid '0-1', sample 0: infra: {detail}" in told


def test_a_sample_that_stays_missing_leaves_its_group_and_one_alone_is_replaced() -> None:
    """Prompt 0-0 keeps two of three samples, 0-1 keeps one, with nothing to compare it with."""
    lost = {("0-0", 1), ("0-1", 0), ("0-1", 2)}

    def missing(uid: str, sample: int, attempt: int) -> str | None:
        return "timeout" if (uid, sample) in lost else None

    words = ["actor_rollout_ref.rollout.n=3", "algorithm.missing.max_refills=2"]
    sampler, rollout = sampled_with("reward", missing, *words)
    sampled = sampler.next()
    uids = sampled.batch.non_tensor_batch["uid"].tolist()
    assert uids == ["0-0"] * 2 + ["0-2"] * 3 + ["0-3"] * 3
    assert [asked.meta_info.get("attempt", 0) for asked in rollout.asked] == [0, 1, 2, 0]
    assert {name for asked in rollout.asked[1:3] for name in sample_names(asked)} == lost
    assert not sampled.batch.batch["token_level_scores"].isnan().any()
    assert sampled.metrics["missing/left_out"] == 3 / 18 and sampled.metrics["missing/timeout"] == 9 / 24
    sampler, _ = sampled_with("reward", missing, *words, "algorithm.adv_estimator=gae")
    assert sampler.next().batch.non_tensor_batch["uid"].tolist() == ["0-0"] * 2 + ["0-1"] + ["0-2"] * 3


def test_what_becomes_of_a_sample_is_set_by_the_reason() -> None:
    reasons = {("0-0", 0): "infra", ("0-1", 0): "timeout", ("0-2", 0): "grading", ("0-3", 0): "dropped"}

    def missing(uid: str, sample: int, attempt: int) -> str | None:
        return reasons.get((uid, sample)) if attempt == 0 else None

    words = ["data.train_batch_size=4", "data.gen_batch_size=4", "actor_rollout_ref.rollout.n=3"]
    words += ["algorithm.missing.timeout=drop", "algorithm.missing.grading=refill"]
    sampler, rollout = sampled_with("session", missing, *words)
    batch = sampler.next().batch
    assert sample_names(rollout.asked[1]) == [("0-0", 0), ("0-2", 0)]
    assert [name for name in reasons if name not in sample_names(batch)] == [("0-1", 0), ("0-3", 0)]
    for where, error in (("session", RolloutError), ("reward", RewardError)):
        sampler, _ = sampled_with(where, missing, *words, "algorithm.missing.infra=raise")
        with pytest.raises(error, match=r"algorithm.missing.infra=raise(.|\n)*uid '0-0', sample 0"):
            sampler.next()


@pytest.mark.parametrize("where", ["session", "reward"])
def test_a_run_ends_where_too_many_samples_are_missing(where) -> None:
    """Of batches of two samples each, the share is taken together: a single failure does not end a run."""

    def half(uid: str, sample: int, attempt: int) -> str | None:
        return "infra" if int(uid.split("-")[1]) >= 2 and attempt == 0 else None

    words = ["data.gen_batch_size=1", "algorithm.missing.max_share=0.7"]
    sampler, rollout = sampled_with(where, half, *words)
    with pytest.raises((RolloutError, RewardError), match=r"12 of the last 16.*|max_share=0.7 \(12 of the last 16\)"):
        for _ in range(4):
            sampler.next()
    assert len([asked for asked in rollout.asked if "attempt" not in asked.meta_info]) == 8

    def dropped(uid: str, sample: int, attempt: int) -> str | None:
        return "dropped"

    sampler, _ = sampled_with(where, dropped)
    with pytest.raises(RolloutError, match="none of the last 12 prompts, a whole pass"):
        sampler.next()


def test_reward_on_error_says_what_becomes_of_failures_and_of_nothing_else() -> None:
    """The manager lists rows as failed; a time limit is a reason of its own."""

    def failing(batch: DataProto, return_dict: bool = False) -> Any:
        result = unjudged(lambda uid, sample, attempt: "timeout" if uid == "0-2" and attempt == 0 else None)(batch)
        attempt = batch.meta_info.get("attempt", 0)
        result["failed"] = [name == ("0-1", 0) and attempt == 0 for name in sample_names(batch)]
        return result

    for on_error, asked_again in (("refill", 3), ("drop", 2), ("zero", 2)):
        rollout = OwnRollout(same)
        sampler = sampler_of(rollout, f"reward.on_error={on_error}", "algorithm.adv_estimator=gae")
        sampler.reward_fn = failing  # type: ignore[assignment]
        batch = sampler.next().batch
        assert len(rollout.asked[1]) == asked_again
        assert (("0-1", 0) in sample_names(batch)) == (on_error != "drop")


def test_sessions_of_several_rows_leave_as_a_whole_and_are_refilled_by_others_of_one() -> None:
    """Sample 0 of the first prompt has two rows, of which one has no score; its refill has a single row."""

    def sessions(answer: DataProto, prompts: DataProto) -> DataProto:
        if prompts.meta_info.get("attempt"):
            return answer
        answer = answer.select_idxs([0, *range(len(answer))])
        answer.non_tensor_batch["session_id"] = object_array(
            [f"sample {sample}" for sample in answer.non_tensor_batch["sample"]]
        )
        answer.non_tensor_batch["trajectory_index"] = object_array([0, 1, *[0] * (len(answer) - 2)])
        return answer

    def judge(batch: DataProto, return_dict: bool = False) -> Any:
        result = reward(batch, return_dict=True)
        first = batch.meta_info.get("attempt", 0) == 0
        result["missing"] = [Unscored("infra") if first and row == 1 else None for row in range(len(batch))]
        return result

    sampler = sampler_of(OwnRollout(sessions))
    sampler.reward_fn = judge  # type: ignore[assignment]
    batch = sampler.next().batch
    assert len(batch) == 6 and sample_names(batch)[0] == ("0-0", 0)
    assert batch.non_tensor_batch["session_id"].tolist() == ["sample 0", "sample 1"] * 3
    assert batch.non_tensor_batch["trajectory_index"].tolist() == [0] * 6


def test_joining_a_batch_with_sessions_makes_every_other_sample_a_session() -> None:
    """Rows without a session were one session of their prompt."""

    def generated(uid: str) -> DataProto:
        batch = OwnRollout(same).generate(prompts_of([uid], samples=2))
        batch.batch["token_level_scores"] = torch.ones(batch.batch["responses"].shape)
        return batch

    sessions = generated("b")
    sessions.non_tensor_batch |= {"session_id": object_array(["x", "x"]), "trajectory_index": object_array([0, 1])}
    joined = join_generated([generated("a"), sessions], PAD)
    assert joined.non_tensor_batch["session_id"].tolist() == ["sample 0", "sample 1", "x", "x"]
    assert joined.non_tensor_batch["trajectory_index"].tolist() == [0, 0, 0, 1]


def test_dynamic_sampling_chooses_among_groups_that_are_complete_again() -> None:
    """Both samples of prompt 0-1 score the same once its missing one is there, so the group is not used."""

    def judge(batch: DataProto, return_dict: bool = False) -> Any:
        result = unjudged(first_time(("0-1", 1), ("0-2", 0)))(batch)
        for row, (uid, _) in enumerate(sample_names(batch)):
            if uid == "0-1" and result["missing"][row] is None:
                result["reward_tensor"][row, 0] = 5.0
        return result

    sampler = sampler_of(OwnRollout(same), "algorithm.filter_groups.enable=True")
    sampler.reward_fn = judge  # type: ignore[assignment]
    batch = sampler.next().batch
    assert batch.non_tensor_batch["uid"].tolist() == ["0-0"] * 2 + ["0-2"] * 2 + ["0-3"] * 2


def test_a_greedy_baseline_is_asked_for_again_alone() -> None:
    def judge(batch: DataProto, return_dict: bool = False) -> Any:
        greedy = len(batch) == len(set(batch.non_tensor_batch["uid"]))
        return unjudged(first_time(("0-1", 0)) if greedy else lambda *_: None)(batch)

    rollout = OwnRollout(same)
    sampler = sampler_of(rollout, "algorithm.adv_estimator=remax")
    sampler.reward_fn = judge  # type: ignore[assignment]
    batch = sampler.next().batch
    assert sample_names(rollout.asked[2]) == [("0-1", 0)]
    assert rollout.asked[2].meta_info == {"global_steps": 1, "validate": False, "do_sample": False, "attempt": 1}
    assert batch.batch["reward_baselines"].tolist() == [1, 1, 2, 2, 3, 3]


def test_scores_of_greedy_baselines_are_no_scores_of_samples() -> None:
    """Only their attempts count: a sample that the trainer never sees says nothing about its rewards."""
    sampler = sampler_of(OwnRollout(same), "algorithm.adv_estimator=remax")
    plain = sampler.reward_fn

    def judge(batch: DataProto, return_dict: bool = False) -> Any:
        result = plain(batch, return_dict=True)
        if len(batch) == len(set(batch.non_tensor_batch["uid"])):
            result["reward_tensor"] += 1000.0
        return result

    sampler.reward_fn = judge  # type: ignore[assignment]
    assert sampler.next().batch.batch["reward_baselines"].min() > 1000
    lowest, largest = sampler.missing_statistics.state()["scores"]
    assert lowest <= largest < 1000


def randomly(seed: int, share: float = 0.35) -> Missing:
    """Which attempts fail is a fact of the attempt, as its tokens are: a resumed run meets the same."""

    def missing(uid: str, sample: int, attempt: int) -> str | None:
        key = [seed, *map(int, uid.split("-")), int(sample), attempt]
        return "infra" if np.random.default_rng(key).random() < share else None

    return missing


@pytest.mark.parametrize("where", ["session", "reward"])
def test_a_resumed_run_refills_the_same_samples_and_counts_on(where, tmp_path) -> None:
    words = ["data.gen_batch_size=2", "algorithm.missing.window=3"]
    whole, _ = sampled_with(where, randomly(1), *words)
    cut, _ = sampled_with(where, randomly(1), *words)
    for _ in range(2):
        whole.next(), cut.next()
    state = cut.save(tmp_path)
    resumed, _ = sampled_with(where, randomly(1), *words)
    resumed.load(tmp_path, state)
    resumed.step = 2
    refilled = 0.0
    for _ in range(3):
        expected, found = whole.next(), resumed.next()
        assert sample_names(found.batch) == sample_names(expected.batch)
        assert torch.equal(found.batch.batch["responses"], expected.batch.batch["responses"])
        assert found.metrics == expected.metrics
        refilled += found.metrics["missing/refilled"]
    assert refilled > 0
    assert resumed.missing_statistics.state() == whole.missing_statistics.state()


def test_another_attempt_draws_with_another_seed() -> None:
    config = load_config("ppo_trainer", ["actor_rollout_ref.rollout.full_determinism=True"]).actor_rollout_ref.rollout
    prompts = prompts_of(["a", "b"], samples=2)
    seeds = []
    for attempt in (0, 1, 2):
        prompts.meta_info = {"global_steps": 3, **({"attempt": attempt} if attempt else {})}
        seeds += [request.sampling.seed for request in requests_of(prompts, config, iter(range(9)).__next__)]
    assert len(set(seeds)) == 12
    prompts.meta_info = {"global_steps": 3, "attempt": 1}
    one = prompts.select_idxs([2])  # whatever else is asked for with it
    assert requests_of(one, config, iter(range(9)).__next__)[0].sampling.seed == seeds[4 + 2]


@pytest.mark.parametrize("where", ["session", "reward"])
def test_validation_leaves_out_what_stays_without_a_score(where, micro_model) -> None:
    micro_tokenizer = AutoTokenizer.from_pretrained(micro_model)
    config = load_config("ppo_trainer", ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"])

    def missing(uid: str, sample: int, attempt: int) -> str | None:
        return "infra" if (uid == "a" and attempt < 2) or uid == "b" else None

    rollout = OwnRollout(lost_sessions(missing) if where == "session" else same)
    judge = unjudged(missing) if where == "reward" else reward
    samples = Samples(micro_tokenizer)
    metrics = validate_answers(
        [prompts_of(["a", "b", "c"])],
        rollout,
        judge,  # type: ignore[arg-type]
        config.actor_rollout_ref.rollout,
        5,
        samples,
        MissingPolicy(config, PAD),
    )
    assert samples.uids == ["a", "c"] and samples.scores == [1.0, 3.0]
    assert metrics["val-aux/missing"] == pytest.approx(1 / 3)
    assert next(value for name, value in metrics.items() if "reward/mean@1" in name) == 2.0
    with pytest.raises(RolloutError, match="none of 1 samples has a reward"):
        validate_answers(
            [prompts_of(["b"])],
            rollout,
            judge,  # type: ignore[arg-type]
            config.actor_rollout_ref.rollout,
            5,
            Samples(micro_tokenizer),
            MissingPolicy(config, PAD),
        )


def test_an_estimator_of_ones_own_declares_how_many_samples_it_needs() -> None:
    @outcome_estimator("best_of_three", compares_samples=True, smallest_group=3)
    def best_of_three(scores, groups):
        return scores

    try:
        words = ["algorithm.adv_estimator=best_of_three", "actor_rollout_ref.rollout.n=4"]
        config = load_config("ppo_trainer", words)
        assert MissingPolicy(config, PAD).smallest_group == 3
        with raises_with(ConfigError, "than 3", "actor_rollout_ref.rollout.n=2"):
            validate(load_config("ppo_trainer", [words[0], "actor_rollout_ref.rollout.n=2"]))
    finally:
        ADV_ESTIMATORS.remove("best_of_three")


def test_what_a_manager_returns_as_missing_is_checked() -> None:
    batch = OwnRollout(same).generate(prompts_of(["a", "b"]))

    def returns(missing: list[Any]) -> Callable[..., Any]:
        return lambda batch, return_dict: {**reward(batch, True), "missing": missing}

    with raises_with(RewardError, "1 values", "'missing'", "2 responses"):
        ask(returns([None]), batch)
    with raises_with(RewardError, "'infra'", "'missing'"):
        ask(returns([None, "infra"]), batch)
    assert ask(reward, batch)["missing"] == [None, None]
