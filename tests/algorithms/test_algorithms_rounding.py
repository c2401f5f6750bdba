"""Rewards that differ by rounding alone give no advantage, at any offset, scale and dtype."""

from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from hybridrl.algorithms import estimate_advantages, masked_var, masked_whiten
from hybridrl.algorithms.algorithm_registry import ADV_ESTIMATORS
from hybridrl.algorithms.diagnostics import explained_variance, group_health
from hybridrl.config import AlgorithmConfig
from hybridrl.trainer.ppo.reward_transform import RewardTransform

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONFIG = SimpleNamespace(
    gamma=1.0,
    lam=1.0,
    norm_adv_by_std_in_grpo=True,
    gdpo_reward_keys=["a", "b"],
    gdpo_reward_weights=None,
    prime_norm="none",
    prime_whiten=True,
    gigpo_mode="mean_std_norm",
    sppo_preference_scale=None,
)
OFFSETS = st.one_of(
    st.floats(-1e6, 1e6, allow_nan=False), st.sampled_from([0.0, 0.1, 1000.1, -1000.1, 1e6, 123456.7, 3e-5])
)
ROWS, WIDTH = 12, 5
OTB = ("optimal_token_baseline", "tir_optimal_token_baseline")


def batch_of(scores: torch.Tensor, dtype: torch.dtype, values: float = 0.0) -> dict[str, torch.Tensor]:
    """Rows of different lengths, with the score on the last token."""
    lengths = torch.tensor([5, 3, 1, 4, 2, 5, 1, 1, 4, 3, 2, 5])
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    rewards = torch.zeros(ROWS, WIDTH, dtype=dtype)
    rewards[torch.arange(ROWS), lengths - 1] = scores.to(dtype)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "old_log_probs": torch.full((ROWS, WIDTH), -1.0, dtype=dtype),
        "sum_pi_squared": torch.full((ROWS, WIDTH), 0.5, dtype=dtype),
        "values": torch.full((ROWS, WIDTH), values, dtype=dtype),
        "reward_baselines": scores.to(dtype),
        "prompt_values": torch.full((ROWS,), 0.3, dtype=torch.float64),
        "process_rewards": torch.full((ROWS, WIDTH), float(scores[0]), dtype=dtype),
        "turn_states": mask * (torch.arange(1, WIDTH + 1) == lengths[:, None]),
    }


def advantages(name: str, tensors: dict[str, torch.Tensor], components: torch.Tensor) -> torch.Tensor:
    others = {
        "uid": np.repeat(np.arange(ROWS // 4), 4),
        "a": components.double().numpy(),
        "b": components.double().numpy()[::-1].copy(),
    }
    found: torch.Tensor = estimate_advantages(name, tensors, others, CONFIG)[0]
    if name in OTB:  # whose last tokens have no baseline where no other trajectory is left
        left = tensors["response_mask"].view(-1, 4, WIDTH).sum(1, keepdim=True)
        found = torch.where((left > 1).expand(-1, 4, -1).reshape(ROWS, WIDTH), found, 0.0)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(ADV_ESTIMATORS.names()))
@settings(max_examples=25, deadline=None)
@given(offset=OFFSETS)
def test_constant_rewards_give_no_advantage(name: str, dtype: str, offset: float) -> None:
    if dtype == "float16":
        offset = offset % 1000.0
    offset = abs(offset) if name == "maxrl" else offset  # which refuses negative rewards
    scores = torch.full((ROWS,), offset, dtype=torch.float64)
    found = advantages(name, batch_of(scores, DTYPES[dtype]), scores)
    least = 1e-7 * abs(offset) if name in OTB and dtype == "float64" else 0.0  # its own epsilon, 1e-8 of the sum
    assert bool((found.abs() <= least).all()), f"{name}: {found.abs().max()}"


SHIFTS = [0.25, 1000.0, -4096.0, 1e6]


@pytest.mark.parametrize("name", sorted(set(ADV_ESTIMATORS.names()) - {"remax", "prime", "maxrl"}))
@settings(max_examples=20, deadline=None)
@given(scores=st.lists(st.integers(-8, 8), min_size=ROWS, max_size=ROWS), shift=st.sampled_from(SHIFTS))
def test_an_offset_of_all_rewards_changes_no_advantage(name: str, scores: list[int], shift: float) -> None:
    base = torch.tensor(scores, dtype=torch.float64) / 4  # float32 holds these and their sums exactly
    least, moved = batch_of(base, torch.float32), batch_of(base + shift, torch.float32)
    before, after = advantages(name, least, base), advantages(name, moved, base + shift)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4 + 2e-7 * abs(shift))


@settings(max_examples=60, deadline=None)
@given(offset=OFFSETS, ulps=st.lists(st.integers(-1, 1), min_size=ROWS, max_size=ROWS))
def test_scores_a_rounding_error_apart_are_equal(offset: float, ulps: list[int]) -> None:
    one = torch.tensor(offset, dtype=torch.float32)
    near = {way: torch.nextafter(one, torch.tensor(float("inf") * way)) for way in (-1, 1)} | {0: one}
    scores = torch.stack([near[way] for way in ulps]).double()
    for name in ("grpo", "gdpo", "rloo", "opo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"):
        found = advantages(name, batch_of(scores, torch.float32), scores)
        assert bool((found == 0).all()), name


def test_a_real_difference_next_to_a_large_offset_counts() -> None:
    scores = torch.tensor([1e6] * 11 + [1e6 + 1], dtype=torch.float64)
    for name in ("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "flash_reinforce", "spo", "gae"):
        found = advantages(name, batch_of(scores, torch.float32), scores)
        assert float(found[-1, 0]) > 0.5, name


@settings(max_examples=60, deadline=None)
@given(offset=OFFSETS, step=st.floats(0, 3))
def test_a_critic_that_predicts_large_values_well_gives_no_advantage(offset: float, step: float) -> None:
    tensors = batch_of(torch.full((ROWS,), offset, dtype=torch.float64), torch.float32)
    values = offset + step * torch.arange(WIDTH, 0, -1, dtype=torch.float64).expand(ROWS, WIDTH)
    mask = tensors["response_mask"].bool()
    tensors["values"] = values.float()
    upcoming = torch.cat([tensors["values"][:, 1:], torch.zeros(ROWS, 1)], 1)
    upcoming = torch.where(torch.cat([mask[:, 1:], torch.zeros(ROWS, 1, dtype=torch.bool)], 1), upcoming, 0.0)
    tensors["token_level_rewards"] = torch.where(mask, tensors["values"] - upcoming, 0.0)  # rounded to float32
    found = advantages("gae", tensors, torch.zeros(ROWS))
    assert bool((found == 0).all()), found.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1000.1, 0.1, -63.7])
def test_masked_statistics_of_equal_values(dtype: str, offset: float) -> None:
    values, mask = torch.full((4, 9), offset, dtype=DTYPES[dtype]), torch.ones(4, 9)
    assert bool((masked_whiten(values, mask) == 0).all())
    assert torch.equal(masked_whiten(values, mask, shift_mean=False), values)
    assert float(masked_var(values, mask)) == 0.0


def test_metrics_of_equal_scores() -> None:
    tensors = batch_of(torch.full((ROWS,), 1000.1), torch.float32)
    returns, mask = torch.full((ROWS, WIDTH), 1000.1), tensors["response_mask"]
    assert explained_variance(torch.rand(ROWS, WIDTH), returns, mask) == 0.0
    split = tensors["token_level_rewards"].clone()
    split[0, :3] = torch.tensor([333.3, 333.3, 333.5])  # the same sum but for rounding
    split[0, 3:] = 0
    health = group_health(split, mask, np.repeat(np.arange(3), 4))
    assert health["health/groups_uniform"] == 1.0


@pytest.mark.parametrize("mode", ["batch", "running"])
@settings(max_examples=40, deadline=None)
@given(offset=OFFSETS)
def test_normalised_constant_rewards_are_zero(mode: str, offset: float) -> None:
    change = RewardTransform(AlgorithmConfig(normalize_rewards=mode))
    one = torch.tensor(offset, dtype=torch.float32)
    for scores in (one, torch.nextafter(one, torch.tensor(torch.inf)), one):
        tensors = batch_of(scores.expand(ROWS).double(), torch.float32)
        moved, _ = change(tensors["token_level_rewards"], tensors["response_mask"])
        assert bool((moved == 0).all()), moved.abs().max()


TO_GO = ("remax", "reinforce_plus_plus", "optimal_token_baseline", "tir_optimal_token_baseline")


@pytest.mark.parametrize("name", TO_GO)
@settings(max_examples=15, deadline=None)
@given(
    each=st.sampled_from([-0.1, 1000.1, 0.3, 1e-3]),
    width=st.integers(2000, 6000),
    seed=st.integers(0, 2**16),
    gamma=st.sampled_from([1.0, 0.9999]),
)
def test_sums_over_long_responses_are_as_exact_as_their_dtype(
    name: str, each: float, width: int, seed: int, gamma: float
) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(width // 2, width, 4)
    mask = (np.arange(width) < lengths[:, None]) & (rng.random((4, width)) > 0.1)
    rewards = np.where(mask, np.float32(each), np.float32(0))
    rewards[np.arange(4), mask.shape[1] - 1 - mask[:, ::-1].argmax(1)] += np.float32(1)
    tensors = {
        "token_level_rewards": torch.from_numpy(rewards),
        "response_mask": torch.from_numpy(mask).long(),
        "reward_baselines": torch.zeros(4),
        "prompt_values": torch.zeros(4),
        "old_log_probs": torch.full((4, width), -1.0),
        "sum_pi_squared": torch.full((4, width), 0.5),
    }
    config = SimpleNamespace(gamma=gamma)
    returns = estimate_advantages(name, tensors, {"uid": np.zeros(4)}, config)[1].double().numpy()
    for row in range(4):
        values, discount = rewards[row][mask[row]].astype(np.float64), gamma if name == "reinforce_plus_plus" else 1.0
        powers = discount ** np.arange(len(values))
        # sum_{s >= t} gamma^(s-t) r_s as a difference of partial sums, which needs no scan
        tails = np.cumsum((values * powers)[::-1])[::-1] / powers
        np.testing.assert_allclose(returns[row][mask[row]], tails, rtol=2e-7, atol=1e-9)
