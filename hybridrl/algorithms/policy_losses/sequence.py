"""Losses whose ratio belongs to the whole sequence.

Legend: B rows of a micro-batch, T response tokens; rho_t = pi / pi_old of a token, n the sequence's number of response
tokens, sg[.] the stop-gradient. Sums over t are over all response tokens of the sequence, which may have several rows
(`algorithms.sessions`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.functional import keep
from hybridrl.algorithms.policy_losses.tokens import ClipRange, Metrics, Tokens, WideClipRange, policy_loss


@policy_loss("gspo", settings=ClipRange, loss_agg_mode="seq-mean-token-mean", whole_sequences=True)
def compute_policy_loss_gspo(tokens: Tokens, settings: ClipRange) -> tuple[Tensor, Metrics]:
    """GSPO, token form (Zheng et al. 2025, arXiv 2507.18071, eq. 13 and 14):

        log s   = 1/n sum_t log rho_t
        log s_t = min(10, sg[log s] + log pi_t - sg[log pi_t])
        l_t     = max(-A s_t, -A clip(s_t, 1 - low, 1 + high))

    Every token has the value of the sequence's ratio s and the gradient of its own log-probability.

    Settings: `clip_ratio_low`, `clip_ratio_high` (3e-4 and 4e-4 in the paper), else `clip_ratio`. The paper's
    objective is `loss_agg_mode=seq-mean-token-mean`; the configured mode is used.
    """
    lengths = tokens.total(tokens.mask).clamp(min=1)
    sequence = (tokens.total(tokens.log_ratio) / lengths).detach()
    ratio = (sequence + tokens.log_prob - tokens.log_prob.detach()).clamp(max=10.0).exp()
    plain = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(1.0 - settings.low, 1.0 + settings.high)
    metrics = {"actor/pg_clipfrac": clipped > plain, "actor/pg_clipfrac_lower": torch.zeros_like(tokens.mask)}
    return torch.maximum(plain, clipped), metrics


@policy_loss("geo_mean", settings=WideClipRange, weighs_itself=True, whole_sequences=True)
def compute_policy_loss_geo_mean(tokens: Tokens, settings: WideClipRange) -> tuple[Tensor, Metrics]:
    """GMPO (Zhao et al. 2025, arXiv 2507.20673): the geometric mean of the token ratios, clipped in log space.

        k_t = sign(A_t) min(sign(A_t) log rho_t, sign(A_t) clip(log rho_t, -low, high))
        l   = -(1/n sum_t A_t) exp(1/n sum_t k_t)           one value per sequence

    All response tokens of a sequence carry l, and `loss_agg_mode` averages them: seq-mean-token-mean is the paper's
    mean over sequences. Importance weights enter by their geometric mean over the sequence.

    Settings: `clip_ratio_low`, `clip_ratio_high` are bounds of log rho (0.4 and 0.4 in the paper), else
    `clip_ratio`. Metrics: `actor/pg_clipfrac` and `actor/pg_clipfrac_lower`, tokens clipped at A > 0 and at A <
    0.
    """
    sign, log_ratio = tokens.advantages.sign(), tokens.log_ratio
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-settings.low, settings.high))
    lengths = tokens.total(tokens.mask).clamp(min=1)
    loss = -(tokens.total(tokens.advantages) / lengths) * (tokens.total(pessimistic) / lengths).exp()
    if tokens.weights is not None:
        log_weights = keep((tokens.weights + 1e-10).log(), tokens.mask)
        loss = loss * (tokens.total(log_weights) / lengths).exp()
    was_clipped = pessimistic != sign * sign * log_ratio
    metrics = {
        "actor/pg_clipfrac": was_clipped & (tokens.advantages > 0),
        "actor/pg_clipfrac_lower": was_clipped & (tokens.advantages < 0),
    }
    return tokens.carry(loss), metrics
