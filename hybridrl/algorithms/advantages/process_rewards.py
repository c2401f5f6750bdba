"""PRIME: an estimator for rewards of steps, which a model learns from outcomes alone.

Legend: B samples, T response tokens, g the group of a sample (same `index`) of n samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.advantages.scan import rewards_to_go
from hybridrl.algorithms.algorithm_registry import register_adv_est
from hybridrl.algorithms.config_access import number, setting
from hybridrl.algorithms.functional import masked_row_sum, masked_whiten, without_rounding
from hybridrl.algorithms.groups import Groups, group_samples, levelled_scores, score_rounding, spread

_WHO = "adv_estimator=prime"


@register_adv_est("prime", needs=("process_rewards",), compares_samples=True, alone=True)
def compute_prime_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    process_rewards: Tensor,
    config: Any = None,
    gamma: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """PRIME (Cui et al. 2025, arXiv 2502.01456, section 3.3): RLOO on process rewards and on the outcome.

    With r_{i,t} the implicit process reward of token t, m_i its mean over the tokens of sample i, and R_i the outcome:

        A_{i,t} = c_p sum_{s >= t} gamma^(s-t) (r_{i,s} - mean_{j != i} m_j) + c_o (R_i - mean_{j != i} R_j)

    A sample without others in its group has no baseline. With `prime_norm=batch_norm`, process rewards are first
    divided by the largest absolute sum of a sample's remaining rewards in the batch; with `prime_whiten`, A is whitened
    over all response tokens. Both are as in the authors' code.

    Args:
        token_level_rewards, response_mask: [B, T].
        index: [B], the prompts' uid.
        process_rewards: [B, T], beta * log(pi / pi_ref) of each response token.
        config: `algorithm`: `reward_dpo_coef` (c_p), `reward_gt_coef` (c_o), `prime_norm`, `prime_whiten`.
        gamma: discount of process rewards; None: `algorithm.gamma`.

    Returns:
        (advantages, returns) [B, T]; returns are A before it is whitened.

    Raises:
        AlgorithmError: rewards are not finite.
    """
    gamma = _number(config, "gamma") if gamma is None else gamma
    process = rewards_to_go(process_rewards, response_mask, 1.0)
    if setting(config, "prime_norm", "none", who=_WHO, root="algorithm") == "batch_norm":
        process_rewards = process_rewards / (process.abs().max() + 1e-6)
    groups = group_samples(index, token_level_rewards)
    tokens = response_mask.bool().sum(-1).clamp(min=1)
    means = masked_row_sum(process_rewards, response_mask, torch.float64) / tokens
    rounding = score_rounding(process_rewards, response_mask)
    means = groups.levelled(means, rounding / tokens)
    centred = process_rewards.double() - _of_others(means, groups).unsqueeze(-1)
    centred = without_rounding(centred, (rounding / tokens).unsqueeze(-1))
    outcomes = levelled_scores(token_level_rewards, response_mask, groups)
    outcomes = _number(config, "reward_gt_coef") * (outcomes - _of_others(outcomes, groups))
    returns = _number(config, "reward_dpo_coef") * rewards_to_go(centred, response_mask, gamma)
    returns = (returns + spread(outcomes, returns, response_mask)).to(process_rewards.dtype)
    if setting(config, "prime_whiten", False, who=_WHO, root="algorithm"):
        return masked_whiten(returns, response_mask, rounding=rounding.amax() if len(returns) else None), returns
    return returns, returns


def _number(config: Any, name: str) -> float:
    """Return a number from the `algorithm` settings; 1 if it is not set."""
    return number(config, name, 1.0, who=_WHO, root="algorithm")


def _of_others(values: Tensor, groups: Groups) -> Tensor:
    """The mean of the other samples of each sample's group, [B] -> [B]; 0 where there are none."""
    mean = groups.mean(values)
    others = mean + (mean - values) / (groups.size - 1).clamp(min=1)  # equal values give exactly their value
    return torch.where(groups.size > 1, others, 0.0)
