"""Divergence PPO: a token takes part while the policy has moved less than a divergence, not less than a ratio.

Legend: B sequences of a micro-batch, T response tokens; p = pi(a_t), q = pi_old(a_t), rho = p / q, sg[.] what takes no
gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.config_access import number
from hybridrl.algorithms.policy_losses.tokens import Metrics, Tokens, aggregate, clip_bounds, read_tokens
from hybridrl.algorithms.registry import register_policy_loss

_EPS = 1e-8


def _probabilities(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """(p, q) without gradient."""
    log_p = tokens.log_prob.detach()
    return log_p.exp(), (log_p - tokens.log_ratio.detach()).exp()


def _dppo(tokens: Tokens, valid: Tensor, loss_agg_mode: str, config: Any, who: str) -> tuple[Tensor, Metrics]:
    """l = -A sg[min(rho, c)] log pi on valid tokens, 0 elsewhere."""
    ceiling = number(config, "clip_ratio_c", 20.0, who=who, low=1.0, open_low=True)
    weight = torch.where(valid, tokens.ratio().detach().clamp(max=ceiling), 0.0)
    metrics = tokens.metrics(
        pg_clipfrac=~valid & (tokens.advantages > 0), pg_clipfrac_lower=~valid & (tokens.advantages < 0)
    )
    return aggregate(-tokens.advantages * weight * tokens.log_prob, tokens, loss_agg_mode, config), metrics


@register_policy_loss("dppo_tv")
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """DPPO with the total variation of the sampled token's Bernoulli (Qi et al. 2026, arXiv 2602.04879):

        valid = p - q <= high      where A > 0
                q - p <= low       elsewhere
        l     = -A sg[min(rho, c)] log pi      on valid tokens, 0 on the others

    Settings: ``clip_ratio_low``, ``clip_ratio_high`` are thresholds of the variation in [0, 1], else ``clip_ratio``;
    ``clip_ratio_c`` = c > 1 truncates the ratio (20 when absent).
    Metrics: ``actor/pg_clipfrac`` and ``actor/pg_clipfrac_lower``, tokens left out at A > 0 and at A < 0.
    """
    low, high = clip_bounds(config, "policy loss dppo_tv")
    tokens = read_tokens(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    p, q = _probabilities(tokens)
    valid = torch.where(tokens.advantages > 0, p - q <= high, p - q >= -low)
    return _dppo(tokens, valid, loss_agg_mode, config, "policy loss dppo_tv")


@register_policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """DPPO with the Kullback-Leibler divergence of the sampled token's Bernoulli (Qi et al. 2026, arXiv 2602.04879):

        D     = q log(q / p) + (1 - q) log((1 - q) / (1 - p))
        valid = D <= high or p <= q      where A > 0
                D <= low  or p >= q      elsewhere
        l     = -A sg[min(rho, c)] log pi      on valid tokens, 0 on the others

    A token that has moved against its advantage always takes part: its gradient brings it back.

    Settings: ``clip_ratio_low``, ``clip_ratio_high`` are thresholds of D, else ``clip_ratio``; ``clip_ratio_c`` = c > 1
    truncates the ratio (20 when absent). Metrics as for `compute_policy_loss_dppo_tv`.
    """
    low, high = clip_bounds(config, "policy loss dppo_kl", low_at_most=None)
    tokens = read_tokens(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    p, q = _probabilities(tokens)
    divergence = -q * tokens.log_ratio.detach() + (1 - q) * ((1 - q + _EPS) / (1 - p + _EPS)).log()
    positive = tokens.advantages > 0
    valid = torch.where(positive, (divergence <= high) | (p <= q), (divergence <= low) | (p >= q))
    return _dppo(tokens, valid, loss_agg_mode, config, "policy loss dppo_kl")
