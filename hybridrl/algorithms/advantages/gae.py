"""Generalised advantage estimation.

Legend: B sequences, T response tokens; m the response mask, which may have holes (tool output between two turns).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.advantages.scan import backwards, check_finite, check_same_shape, unit_interval
from hybridrl.algorithms.algorithm_registry import register_adv_est
from hybridrl.algorithms.functional import keep, masked_whiten, rounding_of, row_blocks
from hybridrl.algorithms.groups import score_rounding
from hybridrl.errors import AlgorithmError


@register_adv_est("gae", needs=("values",))
@torch.no_grad()
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

    t + 1 is the sequence's next response token. V and L are carried unchanged over a hole in the mask, so tool output
    adds no discount step and no value. After the last token V and L are 0.

    Args:
        token_level_rewards, values, response_mask: [B, T].
        gamma, lam: in [0, 1] (`algorithm.gamma`, `algorithm.lam`).

    Returns:
        (advantages, returns): [B, T], zero outside the mask.

    Raises:
        AlgorithmError: gamma or lam is out of range, rewards or values are not finite, or there are fewer than two
            response tokens.
    """
    gamma, lam = unit_interval(gamma, "gamma"), unit_interval(lam, "lam")
    mask = response_mask.bool()
    check_same_shape(mask, token_level_rewards=token_level_rewards, values=values)
    lam_returns = backwards(token_level_rewards, values, mask, gamma, gamma * lam)
    # The rounding of V_t enters L twice at most: as it is, and in the sum of the later differences.
    rounding: Tensor | None = None
    if values.numel():
        largest = torch.where(mask, values, 0.0).abs().amax()
        rounding = score_rounding(token_level_rewards, mask).amax() + rounding_of(largest, values.dtype)
    returns = torch.empty_like(lam_returns)
    for block in row_blocks(returns):
        returns[block] = keep(lam_returns[block] + values[block], mask[block])
    advantages = masked_whiten(lam_returns, mask, rounding=rounding)
    if not bool(torch.isfinite(advantages.sum())):
        # Whitening spreads one non-finite number to all advantages, so name its row here.
        check_finite(token_level_rewards, mask, "token_level_rewards")
        check_finite(values, mask, "values")
        raise AlgorithmError("the advantages overflow: rewards or values are too large for their dtype.")
    return advantages, returns
