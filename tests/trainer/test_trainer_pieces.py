"""The pieces of the dataflow around the estimators, without workers: what they do to a batch, against plain loops."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with
from scored_batches import PAD, generated

from hybridrl.algorithms import AlgorithmError, estimate_advantages
from hybridrl.algorithms.algorithm_registry import ADV_ESTIMATOR_REGISTRY
from hybridrl.config import (
    ActorConfig,
    AlgorithmConfig,
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
from hybridrl.trainer.ppo.reward_transform import RewardTransform
from hybridrl.trainer.ppo.run_requirements import RunRequirements, check_algorithm
from hybridrl.trainer.run import TrainingRun
from hybridrl.utils.metrics import Metric, merge_metrics
from hybridrl.workers.losses import LossCounts, policy_loss_fn


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
        with raises_with(AlgorithmError, f"{name} reads", "old_log_probs", "recompute_old_log_prob=always"):
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
    with raises_with(UserError, f"trainer.{name}=/sys/hybridrl"):
        run.look_for_checkpoint()
