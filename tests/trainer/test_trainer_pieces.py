"""The pieces of the dataflow around the estimators, without workers: what they do to a batch, against plain loops."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms import AlgorithmError, estimate_advantages
from hybridrl.algorithms.algorithm_registry import ADV_ESTIMATOR_REGISTRY
from hybridrl.config import (
    ActorConfig,
    AlgorithmConfig,
    FilterGroupsConfig,
    PFPPOConfig,
    RolloutCorrectionConfig,
    load_config,
)
from hybridrl.errors import UserError
from hybridrl.protocol import DataProto
from hybridrl.registry import POLICY_LOSSES
from hybridrl.trainer.ppo.advantage import SLOT, compute_advantage, critic_metrics, draw_by_reward
from hybridrl.trainer.ppo.batching import epochs_of_mini_batches, join_generated
from hybridrl.trainer.ppo.correction import TRAINED_MASK, correct_rollout
from hybridrl.trainer.ppo.prompt_pool import SURPLUS_FILE, PromptPool
from hybridrl.trainer.ppo.reward_transform import RewardTransform
from hybridrl.trainer.ppo.run_requirements import RunRequirements, check_algorithm
from hybridrl.trainer.run import TrainingRun
from hybridrl.utils.metrics import Metric, merge_metrics
from hybridrl.workers.losses import LossCounts, policy_loss_fn

PAD = 99


def generated(uids: list[str], scores: list[list[float]], prompt_width: int = 3, width: int = 4) -> DataProto:
    """A scored generation batch: every id names its prompt and sample, prompts left-padded, responses right-padded."""
    samples = len(scores[0])
    rows = len(uids) * samples
    lengths = torch.arange(rows) % width + 1
    mask = (torch.arange(width)[None] < lengths[:, None]).long()
    prompts = torch.full((rows, prompt_width), PAD)
    prompts[:, -1] = torch.arange(rows) // samples
    responses = torch.where(mask.bool(), torch.arange(rows)[:, None] + 10, PAD)
    attention = torch.cat([(prompts != PAD).long(), mask], 1)
    token_scores = torch.zeros(rows, width)
    token_scores[torch.arange(rows), lengths - 1] = torch.tensor(scores, dtype=torch.float32).flatten()
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask,
            "token_level_scores": token_scores,
        },
        non_tensors={
            "uid": np.repeat(uids, samples).astype(object),
            "acc": np.array([score > 0 for group in scores for score in group], dtype=object),
        },
        meta_info={"temperature": 1.0},
    )


def pool(prompts: int, enable: bool = True, **more) -> PromptPool:
    return PromptPool(FilterGroupsConfig(enable=enable, **more), prompts, 2, prompts_in_data=8, pad_token_id=PAD)


def uids_of(batch: DataProto) -> list[str]:
    return list(dict.fromkeys(batch.non_tensor_batch["uid"].tolist()))


def filled(steps: PromptPool, batches: Iterator[DataProto]) -> tuple[DataProto, dict[str, float]]:
    """The next step, of as many generation batches as it takes."""
    while steps.needed:
        steps.add(next(batches))
    return steps.take()


def test_the_pool_fills_a_step_and_keeps_the_rest_for_the_next() -> None:
    made = iter(
        [
            generated(["a", "b", "c"], [[0, 0], [0, 1], [1, 1]]),
            generated(["d", "e", "f"], [[1, 0], [0, 2], [3, 0]], prompt_width=5, width=6),
            generated(["g", "h", "i"], [[0, 1], [1, 0], [5, 5]], prompt_width=2, width=3),
        ]
    )
    steps = pool(3)
    first, metrics = filled(steps, made)
    assert uids_of(first) == ["b", "d", "e"] and len(first) == 6
    assert metrics == {
        "filter_groups/generation_batches": 2.0,
        "filter_groups/generated": 6.0,
        "filter_groups/discarded": 2.0,
        "filter_groups/carried_over": 0.0,
        "filter_groups/surplus": 1.0,
        "filter_groups/generated_score/mean": pytest.approx(9 / 12),
        "filter_groups/discarded_score/mean": 0.5,
    }
    assert steps.waiting == 1 and steps.needed == 2
    second, metrics = filled(steps, made)
    assert uids_of(second) == ["f", "g", "h"] and steps.waiting == 0
    assert metrics["filter_groups/carried_over"] == 1.0
    # Rows of different widths lie as they were: same tokens, same scores.
    ids, attention = second.batch["input_ids"], second.batch["attention_mask"].bool()
    assert ids[0][attention[0]].tolist() == [2, *[14] * int(second.batch["response_mask"][0].sum())]
    assert second.batch["token_level_scores"].sum(1).tolist() == [3, 0, 0, 1, 1, 0]


GROUPS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=60)
@given(st.lists(GROUPS, min_size=1, max_size=5), st.integers(1, 4), st.booleans(), st.randoms(use_true_random=False))
def test_groups_of_any_size_in_any_order(batches, prompts, enable, random) -> None:
    """Against dicts of lists: every differing group is taken once, whole, in the order in which groups appear."""
    steps = PromptPool(FilterGroupsConfig(enable=enable), prompts, 2, prompts_in_data=10**6, pad_token_id=PAD)
    expected: dict[str, list[tuple[int, float]]] = {}
    number, taken = 0, []
    for index, groups in enumerate(batches):
        rows = [(f"{index}-{group}", score) for group, scores in enumerate(groups) for score in scores]
        random.shuffle(rows)
        uids, scores = zip(*rows, strict=True)
        batch = generated(list(uids), [[score] for score in scores])
        batch.non_tensor_batch["key"] = np.arange(number, number + len(rows)).astype(object)
        kept: dict[str, list[tuple[int, float]]] = {}
        for place, (uid, score) in enumerate(rows):
            kept.setdefault(uid, []).append((number + place, score))
        number += len(rows)
        expected |= {uid: found for uid, found in kept.items() if not enable or len({score for _, score in found}) > 1}
        steps.add(batch)
        assert steps.waiting == len(expected) - len(taken) and steps.needed == max(prompts - steps.waiting, 0)
        while not steps.needed:
            batch, metrics = steps.take()
            now = list(expected)[len(taken) : len(taken) + prompts]
            taken += now
            wanted = sorted(row for uid in now for row, _ in expected[uid])
            assert batch.non_tensor_batch["key"].tolist() == wanted  # rows keep their order
            assert uids_of(batch) == now
            assert metrics.get("filter_groups/surplus", 0.0) == steps.waiting


def test_rows_of_one_sample_count_by_their_sum() -> None:
    """Two samples of two rows each: a scores 1 and 1 in all, b scores 1 and 2."""
    batch = generated(["a", "b"], [[1, 0, 0, 1], [1, 0, 1, 1]])
    batch.non_tensor_batch["sample"] = np.array([0, 0, 1, 1, 0, 0, 1, 1], dtype=object)
    steps = pool(1)
    steps.add(batch)
    found, metrics = steps.take()
    assert uids_of(found) == ["b"] and metrics["filter_groups/discarded"] == 1.0


def test_a_prompt_that_comes_twice_is_refused() -> None:
    steps = pool(4, enable=False)
    steps.add(generated(["a", "b"], [[0, 1], [1, 1]]))
    with pytest.raises(UserError, match=r"'b'.*data\.sampler"):
        steps.add(generated(["b"], [[0, 1]]))
    with pytest.raises(ValueError, match="2 of 4"):
        steps.take()


def test_a_surplus_goes_through_the_checkpoint(tmp_path) -> None:
    steps = pool(1)
    steps.add(generated(["a", "b"], [[0, 1], [2, 0]]))
    steps.take()
    steps.save(tmp_path)
    other = pool(1)
    other.load(tmp_path)
    assert other.needed == 0
    kept, metrics = other.take()
    assert uids_of(kept) == ["b"] and kept.batch["token_level_scores"].sum(1).tolist() == [2, 0]
    assert metrics["filter_groups/carried_over"] == 1.0 and metrics["filter_groups/generated"] == 0.0
    of_three = PromptPool(FilterGroupsConfig(), 1, 3, 8, PAD)
    with pytest.raises(UserError, match=r"rollout\.n=2"):
        of_three.load(tmp_path)


def test_saved_groups_may_have_lost_samples(tmp_path) -> None:
    """Samples that `reward.on_error=drop` removes can leave every waiting group smaller than `rollout.n`."""
    steps = pool(1, enable=False)
    steps.add(generated(["a", "b"], [[1], [3]]))
    steps.save(tmp_path)
    other = pool(3, enable=False)
    other.load(tmp_path)
    other.add(generated(["c"], [[1, 0]]))
    assert uids_of(other.take()[0]) == ["a", "b", "c"]
    of_three = PromptPool(FilterGroupsConfig(), 1, 3, 8, PAD)
    with pytest.raises(UserError, match=r"rollout\.n=2"):
        of_three.load(tmp_path)
    # The file of an earlier version does not say how many samples there were.
    generated(["a", "b"], [[1], [3]]).save_to_disk(tmp_path / SURPLUS_FILE)
    of_three.load(tmp_path)
    assert of_three.waiting == 2
    generated(["a"], [[1, 2, 3]]).save_to_disk(tmp_path / SURPLUS_FILE)
    with pytest.raises(UserError, match=r"rollout\.n=3"):
        pool(1).load(tmp_path)


def test_without_filter_a_batch_passes_as_it_is() -> None:
    batch, steps = generated(["a", "b"], [[0, 0], [1, 1]]), pool(2, enable=False)
    steps.add(batch)
    found, metrics = steps.take()
    assert found is batch and metrics == {}


def test_another_metric_and_its_absence() -> None:
    batch, steps = generated(["a", "b"], [[1, 2], [0, 2]]), pool(1, metric="acc")
    steps.add(batch)  # `acc` is true for both samples of a
    assert uids_of(steps.take()[0]) == ["b"]
    with pytest.raises(UserError, match=r"metric=accuracy.*acc"):
        pool(1, metric="accuracy").add(batch)


def test_generation_does_not_go_on_for_ever() -> None:
    def batches() -> Iterator[DataProto]:
        while True:
            yield generated(["a", "b", "c"], [[0, 0], [1, 1], [2, 2]])

    with pytest.raises(UserError, match=r"max_num_gen_batches=2.*0 of data.train_batch_size=1"):
        filled(pool(1, max_num_gen_batches=2), batches())
    with pytest.raises(UserError, match="last 9 prompts"):
        filled(pool(1), batches())


def test_joining_fills_columns_that_a_part_lacks() -> None:
    parts = [generated(["a"], [[0, 1]]), generated(["b"], [[0, 1]])]
    del parts[1].non_tensor_batch["acc"]
    assert join_generated(parts, PAD).non_tensor_batch["acc"].tolist() == [False, True, None, None]


# ---------------------------------------------------------------- rewards


@settings(max_examples=30)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=2, max_size=5), min_size=1, max_size=4), st.booleans())
def test_rewards_are_normalised_and_cut(batches, running) -> None:
    mode = "running" if running else "batch"
    transform = RewardTransform(AlgorithmConfig(normalize_rewards=mode, clip_rewards=1.5))
    seen: list[float] = []
    for values in batches:
        scores = torch.zeros(len(values), 3, dtype=torch.float64)
        mask = torch.tensor([[1, 1, 0]] * len(values))
        scores[:, 0], scores[:, 1] = torch.tensor(values) / 4, torch.tensor(values) * 3 / 4
        found, _ = transform(scores, mask)
        seen = [*seen, *values] if running else values
        expected = np.clip((np.array(values) - np.mean(seen)) / (np.std(seen, ddof=1) + 1e-6), -1.5, 1.5)
        np.testing.assert_allclose(found.sum(1), expected, atol=2e-4)
        assert torch.equal(found[:, 0], scores[:, 0]) and bool((found[:, 2] == 0).all())
    again = RewardTransform(AlgorithmConfig(normalize_rewards=mode))
    again.load_state_dict(transform.state_dict())
    assert again.state_dict() == transform.state_dict()


def test_rewards_are_left_alone_by_default() -> None:
    scores = torch.ones(2, 3)
    found, baselines = RewardTransform(AlgorithmConfig())(scores, torch.ones(2, 3), None)
    assert found is scores and baselines is None


def test_a_baseline_passes_through_the_same_change() -> None:
    transform = RewardTransform(AlgorithmConfig(normalize_rewards="batch"))
    scores = torch.tensor([[1.0], [3.0]])
    found, baselines = transform(scores, torch.ones(2, 1), torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(found[:, 0], baselines)


# ---------------------------------------------------------------- PF-PPO


def test_drawn_rows_keep_their_own_advantages_and_mini_batches_their_number() -> None:
    batch = generated(["a", "b", "c", "d"], [[0, 1], [2, 0], [0, 3], [0, 0]])
    batch.batch["advantages"] = batch.batch["responses"].float() * 2
    drawn = draw_by_reward(batch, PFPPOConfig(), seed=3)
    assert torch.equal(drawn.batch["advantages"], drawn.batch["responses"].float() * 2)
    owner = dict(zip(batch.batch["responses"][:, 0].tolist(), batch.non_tensor_batch["uid"], strict=True))
    assert [owner[i] for i in drawn.batch["responses"][:, 0].tolist()] == drawn.non_tensor_batch["uid"].tolist()
    assert drawn.batch["token_level_scores"].sum(1).min() > 0  # weight 1e-8 against 1, 4 and 9
    (minis,) = epochs_of_mini_batches(drawn.non_tensor_batch[SLOT], 2, 1, False, 0)
    assert [len(rows) for rows in minis] == [4, 4]
    same = draw_by_reward(batch, PFPPOConfig(), seed=3)
    assert torch.equal(same.batch["responses"], drawn.batch["responses"])


# ---------------------------------------------------------------- rollout correction


def with_log_probs(old: list[list[float]], rollout: list[list[float]]) -> DataProto:
    mask = torch.ones(len(old), len(old[0]), dtype=torch.int64)
    return DataProto.from_dict(
        tensors={"old_log_probs": torch.tensor(old), "rollout_log_probs": torch.tensor(rollout), "response_mask": mask}
    )


def test_weights_and_rejection_leave_the_sampled_mask() -> None:
    batch = with_log_probs([[-1.0, -1.0], [-1.0, -1.0]], [[-1.0, -2.0], [-4.0, -1.0]])
    metrics = correct_rollout(
        batch,
        RolloutCorrectionConfig(
            rollout_is="token", rollout_is_threshold=2.0, rollout_rs="seq_max_k2", rollout_rs_threshold=1.0
        ),
    )
    torch.testing.assert_close(batch.batch["rollout_is_weights"], torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    assert batch.batch[TRAINED_MASK].tolist() == [[1, 1], [0, 0]]  # k2 of the second row: 3^2 / 2
    assert batch.batch["response_mask"].tolist() == [[1, 1], [1, 1]]
    log_rho = np.array([0, 1, 3, 0])
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((np.exp(log_rho) - 1 - log_rho).mean(), rel=1e-5)


def test_only_measured_by_default_and_replaced_in_bypass_mode() -> None:
    batch = with_log_probs([[-1.0, -1.0]], [[-1.0, -2.0]])
    correct_rollout(batch, RolloutCorrectionConfig())
    assert {"rollout_is_weights", TRAINED_MASK}.isdisjoint(batch.batch.keys())
    correct_rollout(batch, RolloutCorrectionConfig(bypass_mode=True))
    assert batch.batch["old_log_probs"].tolist() == [[-1.0, -2.0]]


def test_the_largest_weight_of_bypass_mode_is_a_maximum_over_micro_batches() -> None:
    """log rho of 0.5 in one micro-batch of one token, of 0.1 in another of three."""
    correction = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", rollout_is="token")
    loss, parts = policy_loss_fn(ActorConfig(), correction), []
    for log_rho, tokens in ((0.5, 1), (0.1, 3)):
        ones = torch.ones(1, tokens)
        fields = {"old_log_probs": -ones, "advantages": ones, "response_mask": ones.long()}
        counts = LossCounts(tokens=4, sequences=2, response_length=3)
        _, metrics = loss({"log_probs": log_rho - ones}, DataProto.from_dict(tensors=fields), counts)
        parts.append({k: v if isinstance(v, Metric) else Metric(v, tokens) for k, v in metrics.items()})
    merged = {name: metric.value for name, metric in merge_metrics(parts).items()}
    assert merged["rollout_corr/rollout_is_max"] == pytest.approx(np.exp(0.5))
    assert merged["rollout_corr/rollout_is_mean"] == pytest.approx((np.exp(0.5) + 3 * np.exp(0.1)) / 4)


# ---------------------------------------------------------------- start-up


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["algorithm.adv_estimator=optimal_token_baseline"], "actor_rollout_ref.actor.calculate_sum_pi_squared=True"),
        (["algorithm.adv_estimator=gdpo"], "algorithm.gdpo_reward_keys"),
        (["algorithm.adv_estimator=gae", "critic.enable=False"], "critic"),
        (["algorithm.adv_estimator=nope"], "grpo"),
        (["algorithm.adv_estimator=decimal:Decimal"], "decimal:Decimal is <class.*not a function.*token_level_rewards"),
        (["algorithm.adv_estimator=math:pi"], r"math:pi is 3.14.*, not a function"),
        (["actor_rollout_ref.actor.clip_ratio_low=1.5"], "actor.clip_ratio_low is 1.5; policy loss vanilla"),
        (["algorithm.rollout_correction.rollout_rs=token_k9"], "rollout_rs"),
        (["algorithm.rollout_correction.rollout_rs=token_k2"], "rollout_rs_threshold"),
        (
            [
                "algorithm.rollout_correction.bypass_mode=True",
                "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
            ],
            "bypass_mode",
        ),
        (
            [
                "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
                "actor_rollout_ref.actor.policy_loss.clip_cov_lb=6",
            ],
            "clip_cov_lb",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name_before_a_model_is_loaded(words, named) -> None:
    config = load_config("ppo_trainer", ["algorithm.adv_estimator=grpo", *words])
    with pytest.raises(AlgorithmError, match=named):
        check_algorithm(config)


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_every_loss_passes_the_check_before_a_run(name) -> None:
    words = [
        f"actor_rollout_ref.actor.policy_loss.loss_mode={name}",
        "actor_rollout_ref.actor.policy_loss.dro_beta=0.1",
    ]
    check_algorithm(load_config("ppo_trainer", words))


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ([], False),
        (["actor_rollout_ref.actor.ppo_epochs=2"], True),
        (["algorithm.use_kl_in_reward=True"], True),
        (["algorithm.rollout_correction.rollout_is=token"], True),
        (["algorithm.rollout_correction.bypass_mode=True", "actor_rollout_ref.actor.ppo_epochs=2"], False),
        (["algorithm.adv_estimator=optimal_token_baseline"], True),
    ],
)
def test_old_log_probs_are_computed_where_something_needs_them(words, needed) -> None:
    base = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}"]
    assert RunRequirements.of(load_config("ppo_trainer", [*base, *words])).old_log_probs is needed


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ([], {"critic", "values"}),
        (["algorithm.adv_estimator=grpo"], set()),
        (["algorithm.adv_estimator=grpo", "critic.enable=True"], {"critic"}),
        (["algorithm.adv_estimator=remax"], {"reward_baselines"}),
        (["algorithm.adv_estimator=tir_optimal_token_baseline"], {"old_log_probs"}),
        (["algorithm.use_kl_in_reward=True"], {"critic", "values", "reference", "ref_log_prob", "old_log_probs"}),
        (
            ["algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=full"],
            {"critic", "values", "reference", "ref_kl", "old_log_probs"},
        ),
        (["actor_rollout_ref.actor.use_kl_loss=True"], {"critic", "values", "reference", "ref_log_prob"}),
        (
            ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_type=full"],
            {"critic", "values", "reference"},
        ),
    ],
)
def test_what_a_run_needs_follows_from_its_settings(words, needed) -> None:
    one_update = "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}"
    found = asdict(RunRequirements.of(load_config("ppo_trainer", [one_update, *words])))
    assert {name for name, value in found.items() if value} == needed


@pytest.fixture
def estimators_of_ones_own(monkeypatch) -> None:
    """Three ways of a user's estimator to ask for old log-probabilities."""

    def named(token_level_rewards, response_mask, old_log_probs=None, **kwargs):
        return old_log_probs * response_mask, old_log_probs * response_mask

    def from_batch(token_level_rewards, response_mask, batch, **kwargs):
        return batch["old_log_probs"], batch["old_log_probs"]

    def from_keywords(token_level_rewards, response_mask, **kwargs):
        return kwargs["old_log_probs"], kwargs["old_log_probs"]

    def of_its_own(token_level_rewards, response_mask, batch, **kwargs):
        return batch["mine"], batch["mine"]

    for function in (named, from_batch, from_keywords, of_its_own):
        monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY, function.__name__, function)


def test_an_estimator_of_ones_own_gets_old_log_probs_or_is_told_how(estimators_of_ones_own) -> None:
    one_update = ["actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}"]

    def needed(name: str) -> bool:
        return RunRequirements.of(
            load_config("ppo_trainer", [f"algorithm.adv_estimator={name}", *one_update])
        ).old_log_probs

    assert needed("named") and not needed("from_batch")
    ones = torch.ones(2, 3)
    tensors = {"token_level_rewards": ones, "response_mask": ones}
    for name in ("from_batch", "from_keywords"):
        with pytest.raises(AlgorithmError, match=rf"{name} reads old_log_probs.*recompute_old_log_prob=always"):
            estimate_advantages(name, tensors, {"uid": np.array(["a", "a"])}, None)
        found, _ = estimate_advantages(name, {**tensors, "old_log_probs": -ones}, {"uid": np.array(["a", "a"])}, None)
        assert torch.equal(found, -ones)
    with pytest.raises(KeyError, match="mine"):  # a fault of another kind keeps its own words
        estimate_advantages("of_its_own", tensors, {"uid": np.array(["a", "a"])}, None)


def test_what_the_critic_is_worth_is_as_written_out() -> None:
    """Against sums over the tokens one by one, with a hole in a row and noise outside the mask."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1]])
    rewards, values = torch.randn(2, 3, 4, generator=generator)
    gamma, lam = 0.9, 0.7
    tensors = {"token_level_rewards": rewards, "values": values, "response_mask": mask}
    batch = DataProto.from_dict(tensors=tensors)
    compute_advantage(batch, "gae", gamma, lam, AlgorithmConfig())
    found = critic_metrics(batch, gamma)
    to_go, gae, states = [], [], []
    for row in range(3):
        places = [place for place in range(4) if mask[row, place]]
        for first in range(len(places)):
            later = places[first:]
            r, v = ([float(x[row, place]) for place in later] for x in (rewards, values))
            deltas = [r[k] + gamma * (v[k + 1] if k + 1 < len(v) else 0.0) - v[k] for k in range(len(later))]
            to_go.append(sum(gamma**k * r[k] for k in range(len(later))))
            gae.append(sum((gamma * lam) ** k * deltas[k] for k in range(len(later))))
            states.append(v[0])
    errors = np.array(to_go) - np.array(states)
    assert found == {
        "critic/vf_explained_var_mc": pytest.approx(1 - np.var(errors) / np.var(to_go), abs=1e-5),
        "critic/advantages/var": pytest.approx(np.var(gae, ddof=1), rel=1e-5),
        "critic/advantages/var_constant_baseline": pytest.approx(np.var(to_go, ddof=1), rel=1e-5),
    }


@pytest.mark.parametrize("name", ["default_local_dir", "rollout_data_dir", "validation_data_dir"])
def test_a_folder_that_cannot_be_written_is_refused_before_models_load(name: str, tmp_path: Path) -> None:
    words = [f"trainer.default_local_dir={tmp_path / 'run'}", f"trainer.{name}=/sys/hybridrl"]
    config = load_config("ppo_trainer", ["actor_rollout_ref.model.path=org/model", *words])
    run = TrainingRun(config, config.trainer, 1, {})
    with pytest.raises(UserError, match=rf"trainer\.{name}=/sys/hybridrl: the folder cannot be written"):
        run.look_for_checkpoint()
