"""A loss that bounds the second moment of the log-ratio over the mini-batch, for data that is many updates old.

Legend: B sequences, T response tokens; rho = pi / pi_old of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.config_access import read_settings
from hybridrl.algorithms.policy_losses.tokens import ACTOR, GROUP, Metrics, Tokens, policy_loss, read_tokens
from hybridrl.settings import key


@dataclass(frozen=True)
class M2POSettings:
    """Settings of the loss `m2po`."""

    m2_threshold: float = key(
        0.04,
        "m2po: largest mean of squared log-ratios of the tokens that stay in the loss, of those that move away",
        gt=0,
    )


@torch.no_grad()
def prepare_m2po(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    seed: int,
    row_ids: Tensor | None = None,
) -> Tensor:
    """Choose the tokens that m2po leaves out of this mini-batch (Algorithm 1 of the paper).

    Of the tokens that move away from pi_old (A > 0 and rho > 1, or A < 0 and rho < 1), those with the largest squared
    log-ratio are left out until the mean over the others is at most `m2_threshold`.

    Args:
        old_log_prob, log_prob, advantages, response_mask: [B, T] of the whole mini-batch; `log_prob` is that of the
            policy before the update.
        config: the actor's settings.
        seed, row_ids: not used; tokens of equal ratio stay or go together.

    Returns:
        [B, T] bool.
    """
    settings = read_settings(M2POSettings, config, who="policy loss m2po", root=ACTOR, group=GROUP)
    tokens = read_tokens(old_log_prob, log_prob, advantages, response_mask, None)
    moment = tokens.log_ratio.double().square()
    moves_away = tokens.mask & (tokens.advantages * tokens.log_ratio > 0)
    ascending = moment[moves_away].sort().values
    count = torch.arange(1, len(ascending) + 1, device=ascending.device)
    remaining = int((ascending.cumsum(0) / count <= settings.m2_threshold).sum())  # means of a sorted list rise
    if remaining == len(ascending):
        return torch.zeros_like(tokens.mask)
    return moves_away & (moment >= ascending[remaining])


@policy_loss("m2po", settings=M2POSettings, prepare=prepare_m2po)
def compute_policy_loss_m2po(tokens: Tokens, settings: M2POSettings) -> tuple[Tensor, Metrics]:
    """M2PO (Zheng et al. 2025, arXiv 2510.01161): l = -A rho, and 0 on the tokens chosen by `prepare_m2po`.

    Settings: `policy_loss.m2_threshold`. Metrics: `actor/pg_clipfrac`, tokens left out; `actor/m2`, the mean of squared
    log-ratios before that.
    """
    assert tokens.prepared is not None
    metrics = {"actor/pg_clipfrac": tokens.prepared, "actor/m2": tokens.log_ratio.detach().square()}
    return torch.where(tokens.prepared.bool(), 0.0, -tokens.advantages * tokens.ratio()), metrics
