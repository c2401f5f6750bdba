"""Generalised advantage estimation.

Legend: B sequences, T response tokens; m the response mask, which may have holes (tool output between two turns).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.errors import AlgorithmError
from hybridrl.algorithms.functional import keep, masked_whiten
from hybridrl.algorithms.registry import AdvantageEstimator, register_adv_est


def _discount(value: float | Tensor, name: str) -> float:
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise AlgorithmError(f"algorithm.{name} is {number}; it must lie in [0, 1].")
    return number


def check_rewards(token_level_rewards: Tensor, response_mask: Tensor, name: str = "token_level_rewards") -> None:
    """Refuse rewards that are NaN or infinite on a response token, naming the rows."""
    bad = ~torch.isfinite(keep(token_level_rewards, response_mask).sum(-1))
    if bool(bad.any()):
        raise AlgorithmError(
            f"{name} are NaN or infinite in rows {bad.nonzero().squeeze(-1)[:8].tolist()}: look at where "
            "they come from before training on them."
        )


@register_adv_est(AdvantageEstimator.GAE)
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float | Tensor,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    r"""GAE (Schulman et al. 2016, arXiv 1506.02438, eq. 16), whitened over the batch.

        delta_t = r_t + gamma V_{t+1} - V_t
        L_t     = delta_t + gamma lam L_{t+1}
        R_t     = L_t + V_t                       (returns, the critic's target)
        A       = (L - mean L) / sqrt(var L + 1e-8)    over all response tokens of the batch

    t + 1 is the sequence's next response token: over a hole in the mask value and advantage are carried on
    unchanged, so tool output costs neither a step of discount nor a value. After the last token V and L are 0.

    Args:
        token_level_rewards, values, response_mask: [B, T].
        gamma, lam: in [0, 1] (``algorithm.gamma``, ``algorithm.lam``).

    Returns:
        (advantages, returns): [B, T], zero outside the mask.

    Raises:
        AlgorithmError: gamma or lam out of range, rewards or values not finite, fewer than two response tokens.
    """
    gamma, lam = _discount(gamma, "gamma"), _discount(lam, "lam")
    check_rewards(token_level_rewards, response_mask)
    check_rewards(values, response_mask, "values")
    # Time runs along the rows here: one step of the scan then reads contiguous memory.
    mask = response_mask.bool().t().contiguous()
    rewards, v = (torch.where(mask, x.t(), 0.0) for x in (token_level_rewards, values))
    decay = torch.where(mask, gamma * lam, 1.0).to(v.dtype)
    next_value, advantage = torch.zeros_like(v[0]), torch.zeros_like(v[0])
    lam_returns = torch.empty_like(v)
    deltas = rewards.sub_(v)
    for t in range(mask.shape[0] - 1, -1, -1):
        delta = torch.add(deltas[t], next_value, alpha=gamma) * mask[t]
        advantage = torch.addcmul(delta, decay[t], advantage, out=lam_returns[t])
        next_value = torch.where(mask[t], v[t], next_value)
    advantages = lam_returns.t().contiguous()
    returns = keep(advantages + values, response_mask)
    return masked_whiten(advantages, response_mask), returns
