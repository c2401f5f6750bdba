"""Losses without a hard clip of the gradient: weighted log-probabilities and soft gates.

Legend: B sequences of a micro-batch, T response tokens; rho = pi / pi_old of a token, sg[.] the stop-gradient.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses.tokens import Metrics, Tokens, WideClipRange, policy_loss
from hybridrl.settings import key


@policy_loss("gpg")
def compute_policy_loss_gpg(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """GPG (Chu et al. 2025, arXiv 2504.02546): l = -A log pi, the plain policy gradient."""
    return -tokens.advantages * tokens.log_prob, {}


@policy_loss("reinforce", loss_agg_mode="seq-mean-token-sum")
def reinforce(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """REINFORCE (Williams 1992) with importance weights w: l = -w A log pi, with w = 1 if none are given.

    `old_log_prob` is used only for `actor/ppo_kl`, the policy's divergence from the policy that `old_log_prob` is from.
    """
    return -tokens.advantages * tokens.log_prob, {}


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Metrics]:
    """The loss `reinforce` with verl's name and signature; `actor/ppo_kl` is measured against the sampler."""
    return reinforce(
        rollout_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, **more
    )


@policy_loss("cispo", settings=WideClipRange)
def compute_policy_loss_cispo(tokens: Tokens, settings: WideClipRange) -> tuple[Tensor, Metrics]:
    """CISPO (MiniMax-M1 2025, arXiv 2506.13585, eq. 4): l = -sg[clip(rho, 1 - low, 1 + high)] A log pi.

    The weight is clipped, not the gradient: no token is dropped.

    Settings: `clip_ratio_low`, `clip_ratio_high`, else `clip_ratio`; low may exceed 1, which disables the
    lower bound as in the paper. Metrics: `actor/pg_clipfrac`, tokens whose weight is clipped.
    """
    ratio = tokens.ratio().detach()
    weight = ratio.clamp(1.0 - settings.low, 1.0 + settings.high)
    metrics = {"actor/pg_clipfrac": weight != ratio, "actor/pg_clipfrac_lower": torch.zeros_like(tokens.mask)}
    return -weight * tokens.advantages * tokens.log_prob, metrics


@dataclass(frozen=True)
class Temperatures:
    """The temperatures of the gate."""

    tau_pos: float = key(MISSING, "where the advantage is positive", path="", gt=0)
    tau_neg: float = key(MISSING, "where it is negative", path="", gt=0)


@policy_loss("sapo", settings=Temperatures, loss_agg_mode="seq-mean-token-mean")
def compute_policy_loss_sapo(tokens: Tokens, settings: Temperatures) -> tuple[Tensor, Metrics]:
    """SAPO (Gao et al. 2025, arXiv 2511.20347): a sigmoid gate in place of the clip.

        l = -A f(rho),   f(x) = 4/tau sigmoid(tau (x - 1)),   tau = tau_pos where A > 0, tau_neg elsewhere

    f has slope 1 at x = 1 and flattens with distance from it.

    Settings: `tau_pos`, `tau_neg`, both positive. The paper's objective is `loss_agg_mode=seq-mean-token-mean`;
    the configured mode is used.
    """
    positive = (tokens.advantages > 0).to(tokens.log_prob.dtype)
    tau = settings.tau_neg + (settings.tau_pos - settings.tau_neg) * positive
    gate = torch.sigmoid(tau * (tokens.ratio() - 1.0)) * 4.0 / tau
    nothing = torch.zeros_like(tokens.mask)
    return -tokens.advantages * gate, {"actor/pg_clipfrac": nothing, "actor/pg_clipfrac_lower": nothing}


@dataclass(frozen=True)
class DROSettings:
    """The weight of the quadratic term."""

    dro_beta: float = key(MISSING, "weight of the quadratic term", gt=0)


@policy_loss("dro", settings=DROSettings, requires=("dro_beta",))
def compute_policy_loss_dro(tokens: Tokens, settings: DROSettings) -> tuple[Tensor, Metrics]:
    """DRO (Richemond et al. 2024, arXiv 2405.19107) as a policy loss on given advantages:

        l = -(A log pi - beta/2 (log pi - log pi_old)^2)

    The squared distance from the old policy replaces ratio and clip.

    Settings: `policy_loss.dro_beta` = beta > 0; there is no default.
    """
    return -(tokens.advantages * tokens.log_prob - 0.5 * settings.dro_beta * tokens.log_ratio.square()), {}
