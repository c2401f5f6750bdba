"""Metrics that reveal a failing RL run before its reward does.

Legend: B samples, T response tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.functional import keep, masked_var, rounding_of
from hybridrl.algorithms.groups import group_samples, levelled_scores


@torch.no_grad()
def group_health(token_level_scores: Tensor, response_mask: Tensor, index: np.ndarray) -> dict[str, float]:
    """Compute the share of prompts whose samples all score the same: a group estimator learns nothing from these.

    Returns:
        `health/groups_uniform`, and among these `health/groups_all_worst` and `health/groups_all_best` (all samples at
        the smallest or at the largest score of the batch). Groups of one are not counted.
    """
    groups = group_samples(index, token_level_scores)
    scores = levelled_scores(token_level_scores, response_mask, groups)
    smallest, largest = groups.extremes(scores)
    several = groups.sizes > 1
    total = several.sum().clamp(min=1)
    uniform = several & (largest == smallest)
    spread = scores.max() > scores.min()
    return {
        "health/groups_uniform": float(uniform.sum() / total),
        "health/groups_all_worst": float((uniform & (largest == scores.min()) & spread).sum() / total),
        "health/groups_all_best": float((uniform & (smallest == scores.max()) & spread).sum() / total),
    }


def _correlation(x: Tensor, y: Tensor) -> float:
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    scale = float((x.square().sum() * y.square().sum()).sqrt())
    return float((x * y).sum()) / scale if scale > 0 else 0.0


@torch.no_grad()
def length_reward_correlation(
    token_level_scores: Tensor, response_mask: Tensor, index: np.ndarray | None = None
) -> float:
    """Compute the correlation of a sample's score with its length, within [-1, 1]; 0 if one of them does not vary.

    Args:
        index: the prompts' uid. If given, the group's means are subtracted from score and length, because hard prompts
            have long and badly scored responses whether or not length is rewarded.
    """
    whole = np.zeros(len(response_mask)) if index is None else index
    groups, lengths = group_samples(whole, token_level_scores), response_mask.bool().sum(-1).double()
    scores = levelled_scores(token_level_scores, response_mask, groups)
    if index is not None:
        scores, lengths = scores - groups.mean(scores), lengths - groups.mean(lengths)
    return _correlation(scores, lengths)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, response_mask: Tensor) -> float:
    """Compute 1 - var(returns - values) / var(returns) over response tokens.

    It is 1 for a perfect critic, 0 for a constant one, negative for a harmful one, and 0 if the returns do not vary.
    """
    if not bool(response_mask.any()):
        return 0.0
    rounding = rounding_of(keep(returns, response_mask).abs().amax(), returns.dtype)
    total = float(masked_var(returns.double(), response_mask, unbiased=False, rounding=rounding))
    residual = float(masked_var(returns.double() - values.double(), response_mask, unbiased=False))
    return 1.0 - residual / total if total > 0 else 0.0
