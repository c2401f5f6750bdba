"""Estimators without groups: rewards to go, with a baseline from the batch if it has one.

Legend: B sequences, T response tokens; G_t the reward to go, sum_{s >= t} gamma^(s-t) r_s over response tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.advantages.outcome_rewards import outcome_estimator
from hybridrl.algorithms.advantages.scan import rewards_to_go, unit_interval
from hybridrl.algorithms.algorithm_registry import register_adv_est
from hybridrl.algorithms.config_access import number
from hybridrl.algorithms.functional import keep, masked_whiten, rounding_of, without_rounding
from hybridrl.algorithms.groups import Groups, levelled_scores, score_rounding, spread
from hybridrl.errors import AlgorithmError


@register_adv_est("reinforce_plus_plus")
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): A = whiten(G) over all response tokens of the batch.

    G_t = r_t + gamma G_{t+1}, where t + 1 is the next response token: G is carried unchanged over holes in the mask.

    Args:
        token_level_rewards, response_mask: [B, T].
        config: `algorithm` settings; `gamma` in [0, 1] is required.

    Returns:
        (advantages, returns = G): [B, T], zero outside the mask.

    Raises:
        AlgorithmError: gamma is missing or out of range, rewards are not finite, or there are fewer than two response
            tokens.
    """
    gamma = unit_interval(number(config, "gamma", who="reinforce_plus_plus", root="algorithm"), "gamma")
    returns = rewards_to_go(token_level_rewards, response_mask, gamma)
    rounding = score_rounding(token_level_rewards, response_mask).amax() if len(returns) else None
    return masked_whiten(returns, response_mask, rounding=rounding), returns


@register_adv_est("flash_reinforce")
@torch.no_grad()
def compute_flash_reinforce_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """FlashREINFORCE (Zhang et al. 2026, `yifanzhang-pro.github.io/FlashREINFORCE`; OpenRLHF 0.11): A_i = R_i - mean R.

    R_i is the sum of sequence i's rewards, and the mean is that of the whole batch, over sequences with a response
    token. There is one sample per prompt, hence no group, and no division by a standard deviation. This is the
    estimator only: the paper's importance weights and its rejection of sequences belong to the policy loss.

    Args:
        token_level_rewards, response_mask: [B, T].
        config: not used.

    Returns:
        (advantages, returns = R_i on each response token): [B, T], zero outside the mask.

    Raises:
        AlgorithmError: rewards are not finite.
    """
    batch = Groups(response_mask.bool().any(-1), response_mask.device)  # sequences with a response token, and others
    scores = levelled_scores(token_level_rewards, response_mask, batch)
    return (
        spread(scores - batch.mean(scores), token_level_rewards, response_mask),
        spread(scores, token_level_rewards, response_mask),
    )


@outcome_estimator("spo", needs=("prompt_values",))
def compute_spo_outcome_advantage(
    scores: Tensor, groups: Groups, prompt_values: Tensor, response_mask: Tensor
) -> Tensor:
    """SPO (Xu and Ding 2025, arXiv 2509.13232): A_i = (d_i - mean d) / (std d + 1e-8), d_i = R_i - v of the prompt.

    v is the prompt's value before this step's rewards (`prompt_values.PromptValues`). Mean and unbiased standard
    deviation are those of the batch, over samples with a response token. One sample per prompt is enough.

    Args:
        prompt_values: [B].

    Raises:
        AlgorithmError: the values have the wrong shape or are not finite.
    """
    if prompt_values.shape != scores.shape or not bool(torch.isfinite(prompt_values).all()):
        raise AlgorithmError(
            f"prompt_values must be one finite number a row, shape {tuple(scores.shape)}; they have shape "
            f"{tuple(prompt_values.shape)}, {int((~torch.isfinite(prompt_values)).sum())} of them not finite."
        )
    batch = Groups(response_mask.bool().any(-1), response_mask.device)  # samples with a response token, and others
    values = prompt_values.double()
    distances = batch.levelled(scores - values, rounding_of(scores.abs() + values.abs(), torch.float32))
    centred = distances - batch.mean(distances)
    return torch.where(centred == 0, 0.0, centred / (batch.std(distances) + 1e-8))


@register_adv_est("remax", needs=("reward_baselines",), unbiased=True)
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """ReMax (Li et al. 2023, arXiv 2310.10505, algorithm 1): A_t = sum_{s >= t} r_s - b.

    The baseline b is the reward of the greedy response.

    Args:
        token_level_rewards, response_mask: [B, T].
        reward_baselines: [B], reward of the prompt's greedy response.
        config: not used.

    Returns:
        (advantages, returns = sum_{s >= t} r_s): [B, T], zero outside the mask.

    Raises:
        AlgorithmError: the baselines have the wrong shape or are not finite.
    """
    if reward_baselines.shape != response_mask.shape[:1] or not bool(torch.isfinite(reward_baselines).all()):
        raise AlgorithmError(
            f"reward_baselines must be one finite number a row, shape ({response_mask.shape[0]},); found shape "
            f"{tuple(reward_baselines.shape)}, {int((~torch.isfinite(reward_baselines)).sum())} of them not finite."
        )
    returns = rewards_to_go(token_level_rewards, response_mask, 1.0)
    baselines = reward_baselines.double().unsqueeze(-1)
    advantages = returns.double() - baselines
    coarser = max(returns.dtype, reward_baselines.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    rounding = score_rounding(token_level_rewards, response_mask).unsqueeze(-1) + rounding_of(baselines, coarser)
    advantages = without_rounding(advantages, rounding).to(returns.dtype)
    return keep(advantages, response_mask), returns
