"""Token baselines of least variance (optimal token baseline, OTB).

Legend: B trajectories, T response tokens; g the trajectories of one prompt; m the response mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.advantages.scan import check_finite, rewards_to_go
from hybridrl.algorithms.algorithm_registry import register_adv_est
from hybridrl.algorithms.functional import keep, without_rounding
from hybridrl.algorithms.groups import Groups, group_samples, score_rounding


def _energy(
    old_log_probs: Tensor, sum_pi_squared: Tensor, rollout_is_weights: Tensor | None, response_mask: Tensor
) -> Tensor:
    """W_t = sum_{s <= t} w_s, with w_s = |grad of log pi_s in the logits|^2 = 1 - 2 pi_s + sum_v pi_v^2, [B, T].

    With importance weights each w_s is multiplied by its squared weight, because the gradient is weighted too.
    """
    check_finite(old_log_probs, response_mask, "old_log_probs")
    check_finite(sum_pi_squared, response_mask, "sum_pi_squared")
    w = 1.0 - 2.0 * keep(old_log_probs, response_mask).exp() + sum_pi_squared
    if rollout_is_weights is not None:
        w = w * rollout_is_weights.square()
    return keep(w, response_mask).cumsum(-1)


def _baseline(
    returns: Tensor, energy: Tensor, mask: Tensor, groups: Groups, handle_zero_tail: bool, epsilon: float
) -> Tensor:
    """B_t = sum_g G_t W_t m_t / (sum_g W_t m_t + epsilon), per position; 0 for a prompt's only trajectory, [B, T]."""
    weight, returns = keep(energy, mask).double(), keep(returns, mask).double()
    baseline = groups.sum(returns * weight) / (groups.sum(weight) + epsilon)
    baseline = baseline[groups.ids]
    # Trajectories without a token do not count as others: a comparison with them carries no information.
    mates = groups.sum(mask.any(-1).double())[groups.ids]
    baseline = torch.where((mates > 1).unsqueeze(-1), baseline, 0.0)
    if handle_zero_tail:
        positions = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
        ends = torch.where(mask, positions, 0).amax(-1).to(returns.dtype)
        is_longest, second = groups.best_and_second(ends)
        alone = is_longest.unsqueeze(-1) & (positions > second.unsqueeze(-1))
        baseline = torch.where(alone, 0.0, baseline)
    return baseline


def _difference(returns: Tensor, baseline: Tensor, token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """G_t - B_t on response tokens, [B, T]; 0 where it is not more than the rounding of the rewards."""
    difference = keep(returns.double() - baseline, response_mask)
    rounding = score_rounding(token_level_rewards, response_mask)
    return without_rounding(difference, rounding.unsqueeze(-1)).to(returns.dtype)


@register_adv_est(
    "optimal_token_baseline", needs=("old_log_probs", "sum_pi_squared"), compares_samples=True, alone=True
)
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Optimal token baseline (Li et al. 2026, arXiv 2602.07078).

        G_t = sum_{s >= t} r_s          W_t = sum_{s <= t} (1 - 2 pi_s + sum_v pi_v^2) rho_s^2
        B_t = sum_g G_t W_t / (sum_g W_t + epsilon)          A_t = G_t - B_t

    W_t, the squared gradient accumulated so far, weights the trajectories of a prompt at each position. Where only one
    trajectory is left, B_t would equal its own G_t and cancel it. With `handle_zero_tail` the longest trajectory keeps
    A_t = G_t beyond the end of the second longest. The only trajectory of a prompt has baseline 0.

    Args:
        token_level_rewards, response_mask: [B, T].
        index: [B] prompt ids (`uid`).
        old_log_probs: [B, T] log pi_s of the sampled tokens.
        sum_pi_squared: [B, T] sum over the vocabulary of squared probabilities (`actor.calculate_sum_pi_squared`).
        rollout_is_weights: [B, T] rho_s of the rollout correction, or None.
        handle_zero_tail: see above.
        epsilon: added to the denominator.

    Returns:
        (advantages, returns = G): [B, T], zero outside the mask.

    Raises:
        AlgorithmError: an input is not finite on a response token.
    """
    returns = rewards_to_go(token_level_rewards, response_mask, 1.0)
    groups = group_samples(index, returns)
    energy = _energy(old_log_probs, sum_pi_squared, rollout_is_weights, response_mask)
    baseline = _baseline(returns, energy, response_mask.bool(), groups, handle_zero_tail, epsilon)
    return _difference(returns, baseline, token_level_rewards, response_mask), returns


@register_adv_est(
    "tir_optimal_token_baseline", needs=("old_log_probs", "sum_pi_squared"), compares_samples=True, alone=True
)
@torch.no_grad()
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The optimal token baseline for trajectories with interleaved tool output (tool-integrated reasoning).

    This applies `compute_optimal_token_baseline_advantage` to the k-th response token of each trajectory instead of its
    k-th position. Tool outputs of different lengths therefore do not shift trajectories against each other. Arguments
    and results are the same.
    """
    mask = response_mask.bool()
    returns = rewards_to_go(token_level_rewards, response_mask, 1.0)
    groups = group_samples(index, returns)
    energy = _energy(old_log_probs, sum_pi_squared, rollout_is_weights, response_mask)
    # Response tokens move to the front of their row; the others go to an extra column, which is cut off.
    order = mask.cumsum(-1) - 1
    width = mask.shape[-1]
    target = torch.where(mask, order, width)

    def compact(values: Tensor) -> Tensor:
        return values.new_zeros((len(values), width + 1)).scatter_(1, target, values)[:, :width]

    baseline = _baseline(compact(returns), compact(energy), compact(mask), groups, handle_zero_tail, epsilon)
    baseline = baseline.gather(1, order.clamp(min=0))
    return _difference(returns, baseline, token_level_rewards, response_mask), returns
