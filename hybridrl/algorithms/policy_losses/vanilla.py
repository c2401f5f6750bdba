"""PPO's clipped surrogate, with asymmetric bounds and the dual clip."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses.tokens import DualClipRange, Metrics, Tokens, policy_loss


@policy_loss("vanilla", settings=DualClipRange)
def compute_policy_loss_vanilla(tokens: Tokens, settings: DualClipRange) -> tuple[Tensor, Metrics]:
    """PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7) with dual clip (Ye et al. 2020, arXiv 1912.09729):

        l = max(-A rho, -A clip(rho, 1 - low, 1 + high))          A >= 0
        l = min(-A c, that)                                       A < 0

    `high` above `low` is DAPO's clip-higher (arXiv 2503.14476, eq. 10).

    Settings: `clip_ratio`, `clip_ratio_low`, `clip_ratio_high`; `clip_ratio_c` = c > 1 (3.0 when absent).

    Metrics: `actor/ppo_kl`, `actor/pg_clipfrac` (tokens where the clip is active), `actor/pg_clipfrac_lower`
    (tokens where the dual clip is).
    """
    ratio, adv = tokens.ratio(), tokens.advantages
    plain, clipped = -adv * ratio, -adv * ratio.clamp(1.0 - settings.low, 1.0 + settings.high)
    pessimistic = torch.maximum(plain, clipped)
    ceiling = -adv * settings.clip_ratio_c
    negative = adv < 0
    loss_mat = torch.where(negative, torch.minimum(ceiling, pessimistic), pessimistic)
    return loss_mat, {
        "actor/pg_clipfrac": clipped > plain,
        "actor/pg_clipfrac_lower": (pessimistic > ceiling) & negative,
    }


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`compute_policy_loss_vanilla` with its settings as arguments, for code written against verl's older signature.

    Returns:
        (loss, clipfrac, ppo_kl, clipfrac_lower)
    """
    config = SimpleNamespace(
        clip_ratio=cliprange, clip_ratio_low=cliprange_low, clip_ratio_high=cliprange_high, clip_ratio_c=clip_ratio_c
    )
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
    )
    return loss, metrics["actor/pg_clipfrac"], metrics["actor/ppo_kl"], metrics["actor/pg_clipfrac_lower"]
