"""What every policy loss begins and ends with.

Legend: B sequences of a micro-batch, T response tokens; rho = pi / pi_old of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hybridrl.algorithms.aggregation import agg_loss
from hybridrl.algorithms.config_access import global_batch_info, number, setting
from hybridrl.algorithms.functional import keep, masked_mean
from hybridrl.errors import AlgorithmError

Metrics = dict[str, Any]
ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Tokens:
    """A micro-batch with everything outside the mask set to zero before any arithmetic, so that NaN cannot spread.

    Attributes:
        log_prob: [B, T], with gradient.
        log_ratio: [B, T] log rho = log_prob - old_log_prob, with gradient.
        advantages: [B, T], without gradient.
        mask: [B, T] bool.
        weights: [B, T] importance weights of the sampler's mismatch, or None.
    """

    log_prob: Tensor
    log_ratio: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None

    def mean(self, values: Tensor) -> Tensor:
        """Token mean over the mask, detached: how metrics are reported."""
        return masked_mean(values.detach().to(self.log_prob.dtype), self.mask)

    def ratio(self) -> Tensor:
        """rho, with the log-ratio clamped to [-20, 20] so that it stays finite."""
        return self.log_ratio.clamp(-20.0, 20.0).exp()

    def metrics(self, **more: Tensor) -> Metrics:
        """Token means: ``actor/ppo_kl`` of -log rho, an estimate of KL(pi_old || pi), and ``actor/<name>`` of more."""
        kl = self.mean(-self.log_ratio.clamp(-20.0, 20.0))
        return {"actor/ppo_kl": kl, **{f"actor/{name}": self.mean(x) for name, x in more.items()}}


def read_tokens(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, rollout_is_weights: Tensor | None
) -> Tokens:
    """Check the shapes of a loss's inputs and cut off everything outside the mask."""
    named = {
        "old_log_prob": old_log_prob,
        "advantages": advantages,
        "response_mask": response_mask,
        "rollout_is_weights": rollout_is_weights,
    }
    for name, tensor in named.items():
        if tensor is not None and tensor.shape != log_prob.shape:
            raise AlgorithmError(
                f"{name} has shape {tuple(tensor.shape)}, log_prob {tuple(log_prob.shape)}; both must be [B, T]."
            )
    mask = response_mask.bool()
    weights = None if rollout_is_weights is None else keep(rollout_is_weights.detach(), mask)
    return Tokens(
        keep(log_prob, mask), keep(log_prob - old_log_prob, mask), keep(advantages.detach(), mask), mask, weights
    )


def aggregate(loss_mat: Tensor, tokens: Tokens, loss_agg_mode: str, config: Any) -> Tensor:
    """This micro-batch's share of the loss, its tokens weighted by rollout-correction weights if there are any."""
    if tokens.weights is not None:
        loss_mat = loss_mat * tokens.weights
    return agg_loss(loss_mat, tokens.mask, loss_agg_mode, **global_batch_info(config))


def clip_bounds(config: Any, who: str, low_at_most: float | None = 1.0) -> tuple[float, float]:
    """(low, high): ``clip_ratio_low`` and ``clip_ratio_high``, each ``clip_ratio`` where it is null or absent.

    Raises:
        AlgorithmError: neither is set, one is negative, or low is above ``low_at_most``
            (1 where 1 - low bounds a ratio).
    """
    low, high = (
        number(config, name if setting(config, name, None, who=who) is not None else "clip_ratio", who=who, low=0.0)
        for name in ("clip_ratio_low", "clip_ratio_high")
    )
    if low_at_most is not None and low > low_at_most:
        raise AlgorithmError(f"{ACTOR}.clip_ratio_low is {low}; {who} needs it in [0, {low_at_most:g}].")
    return low, high
