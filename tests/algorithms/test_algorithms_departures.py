"""Where the numbers depart from verl's: both values, ours from the library and verl's by its formula.

docs/algorithms.md lists them. Those of gpg, of rewards outside the mask and of sequence averages stand with their
estimators and losses.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hybridrl.algorithms as algorithms
from hybridrl.algorithms import agg_loss, rollout_correction_preset, with_global_batch_info

torch.set_num_threads(1)


def test_otb_does_not_compare_with_an_empty_response() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [0, 0]])
    index = np.array([0, 0])
    quiet = torch.full((2, 2), -1.0), torch.full((2, 2), 0.5)
    ours, _ = algorithms.compute_optimal_token_baseline_advantage(rewards, mask, index, *quiet, handle_zero_tail=False)
    assert ours.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    # verl's baseline is the weighted mean over the one row that has a token: its own return, so that nothing is left.
    energy = float(1 - 2 * math.exp(-1.0) + 0.5) * torch.tensor([1.0, 2.0])
    verl = 1.0 - (1.0 * energy) / (energy + 1e-8)
    torch.testing.assert_close(verl, torch.zeros(2), atol=1e-6, rtol=0)


def test_otb_ends_a_trajectory_at_its_last_position() -> None:
    # Row 0 has a hole and ends at position 3 with three tokens; row 1 ends at position 2 with three tokens.
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.5, 0.0]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0]])
    quiet = torch.full((2, 4), -1.0), torch.full((2, 4), 0.5)
    ours, _ = algorithms.compute_optimal_token_baseline_advantage(rewards, mask, np.array([0, 0]), *quiet)
    assert float(ours[0, 3]) == 1.0  # alone there: nothing to compare with
    # verl compares numbers of tokens, three and three, sees no tail, and row 0 cancels itself at position 3.
    weight = 3 * (1 - 2 * math.exp(-1.0) + 0.5)
    assert 1.0 - weight / (weight + 1e-8) == pytest.approx(0.0, abs=1e-6)


def test_returns_and_advantages_outside_the_mask_are_zero() -> None:
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0, 0.0]]), torch.tensor([[1, 0, 1, 0]])
    advantages, returns = algorithms.compute_remax_outcome_advantage(rewards, torch.tensor([0.25]), mask)
    assert returns.tolist() == [[1.0, 0.0, 1.0, 0.0]] and advantages.tolist() == [[0.75, 0.0, 0.75, 0.0]]
    verl = (rewards * mask).flip(-1).cumsum(-1).flip(-1)
    assert verl.tolist() == [[1.0, 1.0, 1.0, 0.0]]


def bypass(info: dict[str, int] | None) -> tuple[float, float, int]:
    """(loss, sum of token losses that remain, how many remain) of a batch in which half of the tokens are rejected."""
    rollout = torch.tensor([[-1.0, -1.0, -1.0, -1.0]])
    train = rollout + torch.tensor([[0.05, 2.0, -0.05, -2.0]])
    correction = rollout_correction_preset("bypass_ppo_clip", rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    config = SimpleNamespace(clip_ratio=0.2, policy_loss=SimpleNamespace(rollout_correction=correction))
    ones = torch.ones(1, 4)
    loss, _ = algorithms.compute_policy_loss_bypass_mode(
        rollout, train, ones, ones, "token-mean", with_global_batch_info(config, **info) if info else config
    )
    return float(loss), -(math.exp(0.05) + math.exp(-0.05)), 2


def test_bypass_divides_by_all_tokens_with_and_without_global_counts() -> None:
    loss, total, left = bypass(None)
    assert loss == pytest.approx(total / 4)
    assert bypass({"batch_num_tokens": 4})[0] == pytest.approx(loss)  # verl too, with global counts
    assert loss != pytest.approx(total / left)  # verl without them: the result depends on the micro-batch


def test_an_empty_mini_batch_is_worth_zero() -> None:
    nothing = torch.zeros(2, 3)
    for mode in algorithms.LOSS_AGG_MODES:
        assert float(agg_loss(torch.ones(2, 3), nothing, mode)) == 0.0
        assert float(agg_loss(torch.ones(2, 3), nothing, mode, 1, 0, 0)) == 0.0
    assert (torch.zeros(()) / nothing.sum()).isnan()  # sum / batch_num_tokens


def test_nan_in_padding() -> None:
    loss, mask = torch.tensor([[1.0, math.nan]]), torch.tensor([[1, 0]])
    assert float(agg_loss(loss, mask, "token-mean")) == 1.0
    assert (loss * mask).sum().isnan()  # a product with the mask keeps it


def test_empty_sequences_do_not_count_in_rollout_metrics() -> None:
    train, rollout = torch.full((2, 2), -1.0), torch.full((2, 2), -1.5)
    mask = torch.tensor([[1, 1], [0, 0]])
    found = algorithms.compute_offpolicy_metrics(train, rollout, mask)
    assert found["training_ppl"] == pytest.approx(math.e) and found["chi2_seq"] == pytest.approx(math.exp(2) - 1)
    verl = algorithms.masked_mean(train, mask, axis=-1).neg().exp().mean()  # the empty row as a perplexity of 1
    assert float(verl) == pytest.approx((math.e + 1) / 2)
    _, weights = algorithms.compute_rollout_correction_weights(train - rollout, mask, "token", 9.0)
    assert weights["rollout_is_seq_mean"] == pytest.approx(math.exp(0.5))  # verl: half of it
