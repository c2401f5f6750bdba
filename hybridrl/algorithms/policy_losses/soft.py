"""Losses without a hard clip of the gradient: weighted log-probabilities and soft gates.

Legend: B sequences of a micro-batch, T response tokens; rho = pi / pi_old of a token, sg[.] what takes no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.config_access import number
from hybridrl.algorithms.policy_losses.tokens import Metrics, aggregate, clip_bounds, read_tokens
from hybridrl.algorithms.registry import register_policy_loss


@register_policy_loss("gpg")
def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """GPG (Chu et al. 2025, arXiv 2504.02546): l = -A log pi, the plain policy gradient."""
    tokens = read_tokens(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    return aggregate(-tokens.advantages * tokens.log_prob, tokens, loss_agg_mode, config), tokens.metrics()


@register_policy_loss("reinforce")
def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """REINFORCE (Williams 1992) with importance weights w: l = -w A log pi, w = 1 when none are given.

    ``rollout_log_prob`` only measures ``actor/ppo_kl``, the divergence of the policy from the sampler.
    """
    tokens = read_tokens(rollout_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    return aggregate(-tokens.advantages * tokens.log_prob, tokens, loss_agg_mode, config), tokens.metrics()


@register_policy_loss("cispo")
def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """CISPO (MiniMax-M1 2025, arXiv 2506.13585, eq. 4): l = -sg[clip(rho, 1 - low, 1 + high)] A log pi.

    The weight is clipped, not the gradient: no token is dropped.

    Settings: ``clip_ratio_low``, ``clip_ratio_high``, else ``clip_ratio``; low may exceed 1, which turns the lower
    bound off as in the paper. Metrics: ``actor/pg_clipfrac``, tokens whose weight is clipped.
    """
    low, high = clip_bounds(config, "policy loss cispo", low_at_most=None)
    tokens = read_tokens(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    ratio = tokens.ratio().detach()
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    metrics = tokens.metrics(pg_clipfrac=weight != ratio, pg_clipfrac_lower=torch.zeros_like(tokens.mask))
    return aggregate(-weight * tokens.advantages * tokens.log_prob, tokens, loss_agg_mode, config), metrics


@register_policy_loss("sapo")
def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """SAPO (Gao et al. 2025, arXiv 2511.20347): a sigmoid gate in place of the clip.

        l = -A f(rho),   f(x) = 4/tau sigmoid(tau (x - 1)),   tau = tau_pos where A > 0, tau_neg elsewhere

    f has slope 1 at x = 1 and flattens with distance from it.

    Settings: ``tau_pos``, ``tau_neg``, both positive. The paper's objective is ``loss_agg_mode=seq-mean-token-mean``;
    the mode that is set is honoured.
    """
    who = "policy loss sapo"
    tau_pos, tau_neg = (number(config, name, who=who, low=0.0, open_low=True) for name in ("tau_pos", "tau_neg"))
    tokens = read_tokens(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    tau = tau_neg + (tau_pos - tau_neg) * (tokens.advantages > 0).to(tokens.log_prob.dtype)
    gate = torch.sigmoid(tau * (tokens.ratio() - 1.0)) * 4.0 / tau
    nothing = torch.zeros_like(tokens.mask)
    metrics = tokens.metrics(pg_clipfrac=nothing, pg_clipfrac_lower=nothing)
    return aggregate(-tokens.advantages * gate, tokens, loss_agg_mode, config), metrics


@register_policy_loss("dro")
def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """DRO (Richemond et al. 2024, arXiv 2405.19107) as a policy loss on given advantages:

        l = -(A log pi - beta/2 (log pi - log pi_old)^2)

    Squared distance from the old policy takes the place of ratio and clip.

    Settings: ``policy_loss.dro_beta`` = beta > 0; there is no default.
    """
    beta = number(config, "policy_loss.dro_beta", who="policy loss dro", low=0.0, open_low=True)
    tokens = read_tokens(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    loss_mat = -(tokens.advantages * tokens.log_prob - 0.5 * beta * tokens.log_ratio.square())
    return aggregate(loss_mat, tokens, loss_agg_mode, config), tokens.metrics()
