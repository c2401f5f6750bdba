"""Estimators that compare the samples of one prompt with each other.

Legend: B samples, T response tokens; R_i = sum of the rewards on sample i's response tokens; g its group (same
`index`) of n samples. Every function here computes one advantage A_i per sample from R and the groups, and the
decorator `outcome.outcome_estimator` makes it an estimator.

All estimators share these arguments: `token_level_rewards, response_mask` [B, T]; `index` [B], the prompts' uid, where
the samples of a group may be in any position; `epsilon`, which is added to a standard deviation; `config`, the
`algorithm` settings, any object with attributes. All raise AlgorithmError if rewards are not finite or the index has
the wrong length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.advantages.outcome_rewards import outcome_estimator
from hybridrl.algorithms.algorithm_registry import register_adv_est
from hybridrl.algorithms.config_access import setting
from hybridrl.algorithms.functional import rounding_of
from hybridrl.algorithms.groups import Groups
from hybridrl.errors import AlgorithmError


def _divide_by_std(argument: bool, config: Any) -> bool:
    """Whether to divide by the standard deviation: both the argument and `norm_adv_by_std_in_grpo` must be True."""
    return argument and bool(setting(config, "norm_adv_by_std_in_grpo", True, who="grpo", root="algorithm"))


def _centred(scores: Tensor, groups: Groups) -> Tensor:
    """R_i - mean_g R; a group of one is not centred and keeps R_i."""
    return scores - torch.where(groups.size > 1, groups.mean(scores), 0.0)


@outcome_estimator("grpo", compares_samples=True, alone=True)
def compute_grpo_outcome_advantage(
    scores: Tensor,
    groups: Groups,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Tensor:
    """GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2): A_i = (R_i - mean_g R) / (std_g R + epsilon).

    The standard deviation is the unbiased one. A group of one is not centred: A_i = R_i / (1 + epsilon).
    With `norm_adv_by_std_in_grpo=False`, as an argument or in `config`, there is no division. This is Dr. GRPO (Liu et
    al. 2025, arXiv 2503.20783), which removes the extra weight that a small standard deviation gives to easy and hard
    prompts.
    """
    advantages = _centred(scores, groups)
    if _divide_by_std(norm_adv_by_std_in_grpo, config):
        advantages = advantages / (groups.std(scores) + epsilon)
    return advantages


# `grpo` is already vectorised, so both names refer to the same function.
compute_grpo_vectorized_outcome_advantage = register_adv_est("grpo_vectorized", compares_samples=True, alone=True)(
    compute_grpo_outcome_advantage
)


@outcome_estimator("maxrl", compares_samples=True)
def compute_maxrl_outcome_advantage(scores: Tensor, groups: Groups) -> Tensor:
    """MaxRL (Tajwar et al. 2026, arXiv 2602.02710): A_i = (R_i - mean_g R) / mean_g R; 0 in a group without reward.

    With rewards 0 and 1 and success probability p of a prompt, the expected gradient of n samples is that of

        sum_{k=1}^{n-1} pass@k / k = sum_{k=1}^{n-1} (1 - (1 - p)^k) / k,

    which tends to log p: the more samples, the nearer to maximum likelihood. The mean in place of GRPO's standard
    deviation weighs a hard prompt by 1 / p.

    Raises:
        AlgorithmError: a reward is negative.
    """
    if bool((scores < 0).any()):
        rows = (scores < 0).nonzero().squeeze(-1)[:8].tolist()
        raise AlgorithmError(
            f"adv_estimator=maxrl divides by the mean reward of a prompt, and the rewards of rows {rows} are negative. "
            "Have the reward function return 0 to 1, and put penalties into the loss (actor.use_kl_loss in place of "
            "algorithm.use_kl_in_reward)."
        )
    mean = groups.mean(scores)
    return torch.where(mean > 0, (scores - mean) / torch.where(mean > 0, mean, 1.0), 0.0)


@outcome_estimator("grpo_passk", compares_samples=True)
def compute_grpo_passk_outcome_advantage(
    scores: Tensor,
    groups: Groups,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Tensor:
    """Pass@k (Tang et al. 2025, arXiv 2503.19595): only the best sample of a group has an advantage, its
    margin over the second best.

        A_i = (R_(1) - R_(2)) / (std_g R + epsilon)    for the sample with the largest reward (the first if tied)
        A_i = 0                                        for the others

    There is no division when `norm_adv_by_std_in_grpo` is False, as an argument or in `config`.

    Raises:
        AlgorithmError: a group has only one sample and therefore no second best.
    """
    alone = (groups.sizes[groups.ids] < 2).nonzero().squeeze(-1)
    if len(alone):
        raise AlgorithmError(
            f"adv_estimator=grpo_passk needs at least 2 samples per prompt, but rows {alone[:8].tolist()} have no "
            "other sample of their prompt. Set actor_rollout_ref.rollout.n to k >= 2."
        )
    is_best, second = groups.best_and_second(scores)
    advantages = torch.where(is_best, scores - second, 0.0)
    if _divide_by_std(norm_adv_by_std_in_grpo, config):
        advantages = advantages / (groups.std(scores) + epsilon)
    return advantages


def _gdpo_components(
    rows: Tensor, groups: Groups, config: Any, non_tensor_batch: Mapping[str, Any] | None
) -> tuple[list[Tensor], list[float]]:
    """The reward components that `algorithm.gdpo_reward_keys` names, [B] each, and their weights."""
    keys = setting(config, "gdpo_reward_keys", None, who="gdpo", root="algorithm")
    if not keys:
        raise AlgorithmError(
            "adv_estimator=gdpo needs algorithm.gdpo_reward_keys: the names of the reward components that the reward "
            "function returns besides 'score', for example [accuracy, format]."
        )
    columns = {} if non_tensor_batch is None else non_tensor_batch
    missing = [key for key in keys if key not in columns]
    if missing:
        raise AlgorithmError(
            f"algorithm.gdpo_reward_keys names {missing}, which the reward function did not return; the batch has "
            f"{sorted(columns)}. Return a dict with these keys and 'score' from it."
        )
    weights = setting(config, "gdpo_reward_weights", None, who="gdpo", root="algorithm")
    weights = [1.0] * len(keys) if weights is None else [float(w) for w in weights]
    if len(weights) != len(keys):
        raise AlgorithmError(
            f"algorithm.gdpo_reward_weights has {len(weights)} entries for the {len(keys)} keys of gdpo_reward_keys; "
            "it needs one each."
        )
    components = []
    for key in keys:
        values = torch.as_tensor(np.asarray(columns[key], dtype=np.float64), device=rows.device)
        bad = ~torch.isfinite(values)
        if values.shape != rows.shape or bool(bad.any()):
            raise AlgorithmError(
                f"reward component {key!r} must hold one finite number a row, {len(rows)} in all; it has shape "
                f"{tuple(values.shape)} and is missing, NaN or infinite in rows "
                f"{bad.nonzero().squeeze(-1)[:8].tolist()}. A session that brings its reward along gives the "
                "components in Scored.extra."
            )
        components.append(groups.levelled(values, rounding_of(values, torch.float32)))  # as a score is stored
    return components, weights


@outcome_estimator("gdpo", compares_samples=True, alone=True, reads_components=True, whitened=True)
def compute_gdpo_outcome_advantage(
    scores: Tensor,
    groups: Groups,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    batch: Mapping[str, Any] | None = None,
) -> Tensor:
    """GDPO (Liu et al. 2026, arXiv 2601.05242): every reward component is normalised separately before the sum.

        A^k_i = (r^k_i - mean_g r^k) / (std_g r^k + epsilon)        for each component k
        A     = whiten(sum_k w_k A^k)                                over all response tokens of the batch

    so that a component with a large scale does not dominate the others. The components are the entries of
    `non_tensor_batch` named by `config.gdpo_reward_keys`; the weights w_k are `config.gdpo_reward_weights` (default 1
    each). `token_level_rewards`, the total, only provides shape and dtype; `batch` is not needed.

    Raises:
        AlgorithmError: there are no keys, the batch lacks a key, the number of weights differs from that of the keys,
            or components are not finite.
    """
    components, weights = _gdpo_components(scores, groups, config, non_tensor_batch)
    total = torch.zeros_like(scores)
    for values, weight in zip(components, weights, strict=True):
        advantage = _centred(values, groups)
        if _divide_by_std(norm_adv_by_std_in_grpo, config):
            advantage = advantage / (groups.std(values) + epsilon)
        total += weight * advantage
    return total


@outcome_estimator("rloo", compares_samples=True, alone=True, unbiased=True)
def compute_rloo_outcome_advantage(
    scores: Tensor,
    groups: Groups,
    epsilon: float = 1e-6,
    config: Any = None,
) -> Tensor:
    """RLOO (Ahmadian et al. 2024, arXiv 2402.14740): the baseline of a sample is the mean of the others.

        A_i = R_i - 1/(n-1) sum_{j != i} R_j = n/(n-1) (R_i - mean_g R)

    In a group of one, A_i = R_i, which is plain REINFORCE. (`rloo_vectorized` returns 0 there.)
    """
    size = groups.size
    return _centred(scores, groups) * torch.where(size > 1, size / (size - 1).clamp(min=1), 1.0)


@outcome_estimator("rloo_vectorized", compares_samples=True, unbiased=True)
def compute_rloo_vectorized_outcome_advantage(
    scores: Tensor,
    groups: Groups,
    epsilon: float = 1e-6,
    config: Any = None,
) -> Tensor:
    """RLOO in which a group of one has advantage zero: A_i = n/(n-1) (R_i - mean_g R) for n > 1, and 0 for n = 1."""
    size = groups.size
    return torch.where(size > 1, (scores - groups.mean(scores)) * size / (size - 1).clamp(min=1), 0.0)


@outcome_estimator("opo", compares_samples=True, alone=True)
def compute_opo_outcome_advantage(
    scores: Tensor,
    groups: Groups,
    response_mask: Tensor,
    epsilon: float = 1e-6,
    config: Any = None,
) -> Tensor:
    """OPO (Hao et al. 2025, arXiv 2505.23585): A_i = R_i - sum_g L_j R_j / sum_g L_j.

    This baseline has the least variance when a sample's squared gradient grows with its length L_i. A group of one has
    baseline 0.
    """
    lengths = response_mask.bool().sum(-1).to(scores.dtype)
    # A group whose responses are all empty has no tokens, and baseline 0.
    return scores - torch.where(groups.size > 1, groups.mean(scores, lengths), 0.0)


@outcome_estimator("gpg", compares_samples=True, alone=True)
def compute_gpg_outcome_advantage(
    scores: Tensor,
    groups: Groups,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
) -> Tensor:
    """GPG (Chu et al. 2025, arXiv 2504.02546): A_i = alpha B / (B - M) (R_i - mean_g R) / f_norm.

    M is the number of samples without a gradient: those of groups in which all rewards are equal (all correct or all
    wrong). They would otherwise dilute the batch's mean. A group of one keeps R_i and has no gradient if R_i is 0.

    Args:
        f_norm: F_norm of the paper; 1 for none.
        alpha: an additional factor.
    """
    centred = _centred(scores, groups)
    smallest, largest = groups.extremes(scores)
    with_gradient = torch.where(groups.size > 1, (smallest < largest)[groups.ids], scores != 0)
    factor = alpha * len(scores) / with_gradient.sum().clamp(min=1).to(scores.dtype)
    return factor * centred / f_norm


@outcome_estimator("reinforce_plus_plus_baseline", compares_samples=True, alone=True, whitened=True)
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    scores: Tensor,
    groups: Groups,
    epsilon: float = 1e-6,
    config: Any = None,
) -> Tensor:
    """REINFORCE++-baseline (Hu et al. 2025, arXiv 2501.03262): the group's mean as baseline, the batch's standard
    deviation as scale.

        A = whiten(R_i - mean_g R)     over all response tokens of the batch

    A group of one has baseline 0. Raises AlgorithmError on a batch of fewer than two response tokens.
    """
    return _centred(scores, groups)
