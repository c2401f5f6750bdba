"""Losses whose ratio belongs to the whole sequence.

Legend: B sequences of a micro-batch, T response tokens; rho_t = pi / pi_old of a token, n the sequence's number of
response tokens, sg[.] what takes no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.aggregation import agg_loss
from hybridrl.algorithms.config_access import global_batch_info
from hybridrl.algorithms.functional import keep
from hybridrl.algorithms.policy_losses.tokens import Metrics, aggregate, clip_bounds, read_tokens
from hybridrl.algorithms.registry import register_policy_loss


@register_policy_loss("gspo")
def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """GSPO, token form (Zheng et al. 2025, arXiv 2507.18071, eq. 13 and 14):

        log s   = 1/n sum_t log rho_t
        log s_t = min(10, sg[log s] + log pi_t - sg[log pi_t])
        l_t     = max(-A s_t, -A clip(s_t, 1 - low, 1 + high))

    Every token has the value of the sequence's ratio s and the gradient of its own log-probability.

    Settings: ``clip_ratio_low``, ``clip_ratio_high`` (3e-4 and 4e-4 in the paper), else ``clip_ratio``. The paper's
    objective is ``loss_agg_mode=seq-mean-token-mean``; the mode that is set is honoured.
    """
    low, high = clip_bounds(config, "policy loss gspo")
    tokens = read_tokens(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    lengths = tokens.mask.sum(-1, keepdim=True).clamp(min=1)
    sequence = (tokens.log_ratio.sum(-1, keepdim=True) / lengths).detach()
    ratio = (sequence + tokens.log_prob - tokens.log_prob.detach()).clamp(max=10.0).exp()
    plain = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(1.0 - low, 1.0 + high)
    metrics = tokens.metrics(pg_clipfrac=clipped > plain, pg_clipfrac_lower=torch.zeros_like(tokens.mask))
    return aggregate(torch.maximum(plain, clipped), tokens, loss_agg_mode, config), metrics


@register_policy_loss("geo_mean")
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """GMPO (Zhao et al. 2025, arXiv 2507.20673): the geometric mean of the token ratios, clipped in log space.

        k_t = sign(A_t) min(sign(A_t) log rho_t, sign(A_t) clip(log rho_t, -low, high))
        l   = -(1/n sum_t A_t) exp(1/n sum_t k_t)           one value a sequence

    All response tokens of a sequence carry l, and ``loss_agg_mode`` averages them: seq-mean-token-mean is the paper's
    mean over sequences. Importance weights enter by their geometric mean over the sequence.

    Settings: ``clip_ratio_low``, ``clip_ratio_high`` are bounds of log rho (0.4 and 0.4 in the paper), else
    ``clip_ratio``. Metrics: ``actor/pg_clipfrac`` and ``actor/pg_clipfrac_lower``, tokens clipped at A > 0 and at A <
    0.
    """
    low, high = clip_bounds(config, "policy loss geo_mean", low_at_most=None)
    tokens = read_tokens(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    sign, log_ratio = tokens.advantages.sign(), tokens.log_ratio
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
    lengths = tokens.mask.sum(-1, keepdim=True).clamp(min=1)
    loss = -(tokens.advantages.sum(-1, keepdim=True) / lengths) * (pessimistic.sum(-1, keepdim=True) / lengths).exp()
    if tokens.weights is not None:
        log_weights = keep((tokens.weights + 1e-10).log(), tokens.mask)
        loss = loss * (log_weights.sum(-1, keepdim=True) / lengths).exp()
    was_clipped = pessimistic != sign * sign * log_ratio
    metrics = tokens.metrics(
        pg_clipfrac=was_clipped & (tokens.advantages > 0), pg_clipfrac_lower=was_clipped & (tokens.advantages < 0)
    )
    return agg_loss(loss.expand_as(log_ratio), tokens.mask, loss_agg_mode, **global_batch_info(config)), metrics
