"""Every estimator with missing samples, by complete enumeration: all outcomes of a tiny policy, all samples missing.

The policy writes `a`, `ba` or `bb`: three responses of two lengths, by two binary choices with one parameter each.
"""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hybridrl import algorithms
from hybridrl.algorithms import estimate_advantages
from hybridrl.errors import AlgorithmError
from hybridrl.registry import ADV_ESTIMATORS

NAMES = [e.value for e in algorithms.AdvantageEstimator]
CONFIG = SimpleNamespace(gamma=0.9, lam=0.8, norm_adv_by_std_in_grpo=True, gdpo_reward_keys=["x", "y"])
SAMPLES, MISSING = 3, 0.3
CHOICE_B, CHOICE_BB = 0.6, 0.3  # probabilities of b first, and of b after it
#: of the responses a, ba, bb
PROBABILITY = [1 - CHOICE_B, CHOICE_B * (1 - CHOICE_BB), CHOICE_B * CHOICE_BB]
REWARD = [0.25, 1.0, -0.5]
TOKENS = [1, 2, 2]
#: gradient of log pi of each token in the two logits: [response, token, parameter]
SCORE = torch.tensor(
    [
        [[-CHOICE_B, 0.0], [0.0, 0.0]],
        [[1 - CHOICE_B, 0.0], [0.0, -CHOICE_BB]],
        [[1 - CHOICE_B, 0.0], [0.0, 1 - CHOICE_BB]],
    ],
    dtype=torch.float64,
)
LOG_PROBS = [
    [math.log(1 - CHOICE_B), 0.0],
    [math.log(CHOICE_B), math.log(1 - CHOICE_BB)],
    [math.log(CHOICE_B), math.log(CHOICE_BB)],
]
SQUARES = [CHOICE_B**2 + (1 - CHOICE_B) ** 2, CHOICE_BB**2 + (1 - CHOICE_BB) ** 2]
#: gradient of the expected reward
TRUE = sum(p * r * SCORE[y].sum(0) for y, (p, r) in enumerate(zip(PROBABILITY, REWARD, strict=True)))


def batch_of(groups: list[tuple[int, ...]], name: str = "") -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """A batch of groups of responses for an estimator; `maxrl` refuses negative rewards."""
    rows = [response for group in groups for response in group]
    mask = torch.tensor([[1, int(TOKENS[y] > 1)] for y in rows]).reshape(-1, 2)
    rewards = torch.zeros(len(rows), 2, dtype=torch.float64)
    for row, y in enumerate(rows):
        rewards[row, TOKENS[y] - 1] = REWARD[y] - (min(REWARD) if name == "maxrl" else 0.0)

    def table(values: list[list[float]]) -> torch.Tensor:
        return torch.tensor([values[y] for y in rows], dtype=torch.float64).reshape(-1, 2) * mask

    tensors = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "values": table([[0.3, 0.0], [0.3, 0.5], [0.3, 0.5]]),
        "old_log_probs": table(LOG_PROBS),
        "sum_pi_squared": table([SQUARES] * 3),
        "process_rewards": table([[0.1, 0.0], [0.2, 0.4], [0.2, -0.3]]),
        "turn_states": table([[1, 0], [0, 1], [0, 1]]).int(),  # one turn, in the same situation
        "prompt_values": torch.full((len(rows),), 0.4, dtype=torch.float64),
        "reward_baselines": torch.full((len(rows),), 0.7, dtype=torch.float64),
    }
    others = {"uid": np.array([f"{n}" for n, group in enumerate(groups) for _ in group], dtype=object)}
    others |= {"x": np.array([REWARD[y] for y in rows], dtype=object)}
    others |= {"y": np.array([float(TOKENS[y]) for y in rows], dtype=object)}
    return tensors, others


def gradient(name: str, group: tuple[int, ...], config: object = CONFIG) -> torch.Tensor:
    """The mean over the samples of a group of advantage times gradient of the log-probability, [2]."""
    advantages, _ = estimate_advantages(name, *batch_of([group], name), config)
    return (advantages.unsqueeze(-1) * SCORE[list(group)]).sum((0, 1)) / len(group)


def expected_gradient(name: str, size: int, config: object = CONFIG) -> torch.Tensor:
    """Over all outcomes of a group in which no sample is missing."""
    total = torch.zeros(2, dtype=torch.float64)
    for group in itertools.product(range(3), repeat=size):
        total += math.prod(PROBABILITY[y] for y in group) * gradient(name, group, config)
    return total


def with_missing(name: str, lost: list[float]) -> dict[int, torch.Tensor]:
    """The expected gradient by the number of samples that are left, where a response y is missing with lost[y]."""
    sums: dict[int, torch.Tensor] = {}
    weights: dict[int, float] = {}
    for group in itertools.product(range(3), repeat=SAMPLES):
        for kept in itertools.product((True, False), repeat=SAMPLES):
            left = tuple(y for y, is_kept in zip(group, kept, strict=True) if is_kept)
            if len(left) < smallest(name):
                continue
            weight = math.prod(PROBABILITY[y] for y in group)
            weight *= math.prod((1 - lost[y]) if k else lost[y] for y, k in zip(group, kept, strict=True))
            sums[len(left)] = sums.get(len(left), torch.zeros(2).double()) + weight * gradient(name, left)
            weights[len(left)] = weights.get(len(left), 0.0) + weight
    return {size: total / weights[size] for size, total in sums.items()}


def smallest(name: str) -> int:
    """Fewest samples that the test takes: what the estimator needs, and two tokens where advantages are whitened."""
    whitens = name in ("gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    return max(ADV_ESTIMATORS.metadata(name).fewest_samples, 2 if whitens else 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_that_lost_samples_at_random_is_worth_a_smaller_group(name) -> None:
    """And where the estimator is declared unbiased, that is the gradient of the expected reward, for every size."""
    found = with_missing(name, [MISSING] * 3)
    assert found.keys() == set(range(smallest(name), SAMPLES + 1))
    for size, value in found.items():
        torch.testing.assert_close(value, expected_gradient(name, size), rtol=1e-9, atol=1e-12)
    unbiased = all(torch.allclose(value, TRUE, rtol=1e-9, atol=1e-12) for value in found.values())
    assert unbiased == ADV_ESTIMATORS.metadata(name).unbiased


def test_unbiased_estimators_are_so_for_a_sample_that_is_alone() -> None:
    """`rloo` has no baseline then, which `alone` says; `rloo_vectorized` has no advantage."""
    torch.testing.assert_close(expected_gradient("rloo", 1), TRUE, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(expected_gradient("remax", 1), TRUE, rtol=1e-9, atol=1e-12)
    assert not expected_gradient("rloo_vectorized", 1).any()


@pytest.mark.parametrize("size", [2, 3])
def test_dr_grpo_is_biased_by_the_share_of_the_others_in_its_baseline(size) -> None:
    config = SimpleNamespace(**{**vars(CONFIG), "norm_adv_by_std_in_grpo": False})
    found = expected_gradient("grpo", size, config)
    torch.testing.assert_close(found, (size - 1) / size * TRUE, rtol=1e-9, atol=1e-12)


def test_a_missing_score_of_0_is_another_gradient_and_missing_by_reward_is_told_by_the_bound() -> None:
    """What the library does not do: an unbiased estimator with zeros for missing rewards is biased by their share."""
    total = torch.zeros(2, dtype=torch.float64)
    for group in itertools.product(range(3), repeat=2):
        for kept in itertools.product((True, False), repeat=2):
            weight = math.prod(
                PROBABILITY[y] * ((1 - MISSING) if k else MISSING) for y, k in zip(group, kept, strict=True)
            )
            tensors, others = batch_of([group])
            tensors["token_level_rewards"] *= torch.tensor(kept)[:, None]
            advantages, _ = estimate_advantages("rloo", tensors, others, CONFIG)
            total += weight * (advantages.unsqueeze(-1) * SCORE[list(group)]).sum((0, 1)) / 2
    torch.testing.assert_close(total, (1 - MISSING) * TRUE, rtol=1e-9, atol=1e-12)
    # only the best response is ever missing: the expected gradient becomes that of another policy's samples
    by_reward = with_missing("rloo", [0.0, 0.5, 0.0])[SAMPLES]
    assert not torch.allclose(by_reward, TRUE, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_groups_of_any_size_are_estimated_one_by_one(name) -> None:
    """The formula of a group uses its own samples; some estimators have a factor or a mean of the batch besides."""
    groups = [(0, 1, 2, 1), (1, 2), (2, 1, 1)]
    if smallest(name) == 1 or ADV_ESTIMATORS.metadata(name).alone:
        groups.append((1,))
    whole, _ = estimate_advantages(name, *batch_of(groups, name), CONFIG)
    assert torch.isfinite(whole).all()
    tensors, others = batch_of(groups, name)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(1))
    mixed, _ = estimate_advantages(
        name, {key: value[order] for key, value in tensors.items()}, {k: v[order] for k, v in others.items()}, CONFIG
    )
    torch.testing.assert_close(mixed, whole[order], rtol=1e-9, atol=1e-9)
    of_the_batch = {
        "gae",
        "gdpo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "flash_reinforce",
        "gpg",
        "spo",
    }
    if name not in of_the_batch:
        alone = [estimate_advantages(name, *batch_of([group], name), CONFIG)[0] for group in groups]
        torch.testing.assert_close(whole, torch.cat(alone), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_left_is_no_advantage_or_an_error_that_says_so(name) -> None:
    try:
        advantages, returns = estimate_advantages(name, *batch_of([], name), CONFIG)
    except AlgorithmError as error:
        assert "token" in str(error) or "turn" in str(error)
    else:
        assert advantages.shape == returns.shape == (0, 2)
