"""Divergence PPO: a token contributes while the policy's divergence, rather than the ratio, is below a threshold.

Legend: B sequences of a micro-batch, T response tokens; p = pi(a_t), q = pi_old(a_t), rho = p / q, sg[.] the
stop-gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses.tokens import ClipRange, Metrics, Tokens, WideClipRange, policy_loss
from hybridrl.settings import key

_EPS = 1e-8


@dataclass(frozen=True)
class VariationRange(ClipRange):
    """Thresholds of the total variation, and the bound at which the ratio is truncated."""

    clip_ratio_c: float = key(20.0, "where the ratio is truncated", path="", gt=1)


@dataclass(frozen=True)
class DivergenceRange(WideClipRange):
    """Thresholds of the divergence, and the bound at which the ratio is truncated."""

    clip_ratio_c: float = key(20.0, "where the ratio is truncated", path="", gt=1)


def _probabilities(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """(p, q) without gradient."""
    log_p = tokens.log_prob.detach()
    return log_p.exp(), (log_p - tokens.log_ratio.detach()).exp()


def _dppo(tokens: Tokens, valid: Tensor, ceiling: float) -> tuple[Tensor, Metrics]:
    """l = -A sg[min(rho, c)] log pi on valid tokens, 0 elsewhere."""
    ratio = tokens.ratio().detach()
    weight = torch.where(valid, ratio.clamp(max=ceiling), 0.0)
    metrics = {"actor/pg_clipfrac": ~valid, "actor/pg_clipfrac_lower": valid & (ratio > ceiling)}
    return -tokens.advantages * weight * tokens.log_prob, metrics


@policy_loss("dppo_tv", settings=VariationRange)
def compute_policy_loss_dppo_tv(tokens: Tokens, settings: VariationRange) -> tuple[Tensor, Metrics]:
    """DPPO with the total variation of the sampled token's Bernoulli (Qi et al. 2026, arXiv 2602.04879):

        valid = p - q <= high      where A > 0
                q - p <= low       elsewhere
        l     = -A sg[min(rho, c)] log pi      on valid tokens, 0 on the others

    Settings: `clip_ratio_low`, `clip_ratio_high` are thresholds of the variation in [0, 1], else `clip_ratio`;
    `clip_ratio_c` = c > 1 truncates the ratio (20 when absent).
    Metrics: `actor/pg_clipfrac`, tokens left out, and `actor/pg_clipfrac_lower`, tokens whose ratio is truncated.
    """
    p, q = _probabilities(tokens)
    valid = torch.where(tokens.advantages > 0, p - q <= settings.high, p - q >= -settings.low)
    return _dppo(tokens, valid, settings.clip_ratio_c)


@policy_loss("dppo_kl", settings=DivergenceRange)
def compute_policy_loss_dppo_kl(tokens: Tokens, settings: DivergenceRange) -> tuple[Tensor, Metrics]:
    """DPPO with the Kullback-Leibler divergence of the sampled token's Bernoulli (Qi et al. 2026, arXiv 2602.04879):

        D     = q log(q / p) + (1 - q) log((1 - q) / (1 - p))
        valid = D <= high or p <= q      where A > 0
                D <= low  or p >= q      elsewhere
        l     = -A sg[min(rho, c)] log pi      on valid tokens, 0 on the others

    A token that has moved against its advantage always contributes: its gradient corrects the move.

    Settings: `clip_ratio_low`, `clip_ratio_high` are thresholds of D, else `clip_ratio`; `clip_ratio_c` = c > 1
    truncates the ratio (20 when absent). Metrics as for `compute_policy_loss_dppo_tv`.
    """
    p, q = _probabilities(tokens)
    divergence = -q * tokens.log_ratio.detach() + (1 - q) * ((1 - q + _EPS) / (1 - p + _EPS)).log()
    positive = tokens.advantages > 0
    valid = torch.where(positive, (divergence <= settings.high) | (p <= q), (divergence <= settings.low) | (p >= q))
    return _dppo(tokens, valid, settings.clip_ratio_c)
