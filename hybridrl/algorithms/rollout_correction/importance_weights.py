"""Importance weights for samples that another policy drew.

Legend: B sequences, T response tokens; log rho = log pi_train - log pi_rollout of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.functional import keep, masked_mean
from hybridrl.algorithms.rollout_correction.thresholds import (
    ROOT,
    SAFETY_BOUND,
    check_same_shape,
    floats,
    parse_is_threshold,
    require_tokens,
    safe,
)
from hybridrl.algorithms.sequences import Sequences
from hybridrl.errors import AlgorithmError

IS_LEVELS = ("token", "sequence")


def raw_weights(
    log_ratio: Tensor, response_mask: Tensor, rollout_is: str, sequences: Sequences | None = None
) -> tuple[Tensor, Tensor]:
    """Return (weights [B, T] before any bound, zero outside the mask; their log-ratio, [B, T] or [B, 1]).

    Without `sequences` each row is a sequence.
    """
    if rollout_is not in IS_LEVELS:
        raise AlgorithmError(f"{ROOT}.rollout_is is {rollout_is!r}; choose from {', '.join(IS_LEVELS)} and null.")
    log_ratio = keep(log_ratio.detach(), response_mask)
    if rollout_is == "sequence":
        log_ratio = (sequences or Sequences()).sum(log_ratio)
    weights = safe(log_ratio).exp().expand(response_mask.shape)
    return keep(weights, response_mask), log_ratio


def bounded_weights(weights: Tensor, upper: float, lower: float | None) -> Tensor:
    """min(w, upper), or w inside [lower, upper] and 0 outside."""
    if lower is None:
        return weights.clamp(max=upper)
    return torch.where((weights >= lower) & (weights <= upper), weights, 0.0)


def weights_mean(weights: Tensor, response_mask: Tensor, rollout_is: str, sequences: Sequences | None = None) -> Tensor:
    """Mean over tokens, or over sequences for sequence weights; 1 if the mean is 0."""
    if rollout_is == "sequence":
        mask = response_mask.bool().to(weights.dtype)
        share = mask / (sequences or Sequences()).sum(mask).clamp(min=1)  # of a token in its sequence
        mean = keep(weights * share, response_mask).sum() / share.sum().clamp(min=1)
    else:
        mean = masked_mean(weights, response_mask)
    return torch.where(mean > 1e-8, mean, 1.0)


@torch.no_grad()
def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: str | float | None = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Compute the bounded importance weights w of the sampled tokens.

        token:     w_t = exp(log rho_t)                      sequence:  w_t = exp(sum_s log rho_s) for all t
        number c:  min(w, c)          truncated importance sampling (Espeholt et al. 2018, arXiv 1802.01561)
        "lo_hi":   w if lo <= w <= hi else 0                 IcePop (Ling team 2025, arXiv 2510.18855)

    Args:
        log_ratio: [B, T] log pi_train - log pi_rollout; exponents are clamped to [-20, 20].
        response_mask: [B, T].
        rollout_is: "token" or "sequence".
        rollout_is_threshold: see above.
        rollout_is_batch_normalize: divide by the mean of the bounded weights, over tokens or over sequences. This
            requires the whole batch, since the mean is over the given rows.

    Returns:
        (weights [B, T], zero outside the mask and without gradient; metrics `rollout_is_*`, see `compute_is_metrics`,
        with `rollout_is_oob_ratio` for IcePop and `rollout_is_batch_norm_factor` if normalised).

    Raises:
        AlgorithmError: the level is unknown, the threshold is invalid, there is no token, or shapes differ.
    """
    upper, lower = parse_is_threshold(rollout_is_threshold)
    check_same_shape(log_ratio=log_ratio, response_mask=response_mask)
    raw, used_log_ratio = raw_weights(log_ratio, response_mask, rollout_is)
    weights = bounded_weights(raw, upper, lower)
    metrics = compute_is_metrics(weights, raw, used_log_ratio, response_mask, rollout_is, upper, lower)
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = float(masked_mean(((raw < lower) | (raw > upper)).float(), response_mask))
    if rollout_is_batch_normalize:
        mean = weights_mean(weights, response_mask, rollout_is)
        weights = weights / mean
        metrics["rollout_is_batch_norm_factor"] = float(mean)
    return weights, metrics


@torch.no_grad()
def compute_is_metrics(
    rollout_is_weights: Tensor,
    raw_rollout_is_weights: Tensor,
    log_ratio_for_metrics: Tensor,
    response_mask: Tensor,
    rollout_is: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float | None = None,
) -> dict[str, float]:
    """Measure how far the importance weights are from 1.

    `rollout_is_{mean,std,max,min}` describe the bounded weights over tokens (max and min the unbounded ones at sequence
    level). `rollout_is_ratio_fraction_{high,low}` is the share of unbounded weights beyond the threshold, and
    `rollout_is_eff_sample_size` is (mean w)^2 / mean w^2. `rollout_is_seq_*` describe each sequence's mean weight in
    the same way. Sequences without a token are excluded.

    Args:
        rollout_is_weights, raw_rollout_is_weights: [B, T] bounded and unbounded weights.
        log_ratio_for_metrics: [B, T] or [B, 1] unclamped log-ratio of the weights' level.
        response_mask: [B, T].
        rollout_is: the level, "token" or "sequence".
        rollout_is_threshold, rollout_is_threshold_lower: bounds; the lower one is 1 / upper when None.

    Raises:
        AlgorithmError: there is no token.
    """
    require_tokens(response_mask)
    high = rollout_is_threshold
    low = 1.0 / high if rollout_is_threshold_lower is None else rollout_is_threshold_lower
    mask = response_mask.bool()
    rows = mask.any(-1)
    weights, raw = rollout_is_weights[mask], raw_rollout_is_weights[mask]
    metrics: dict[str, Tensor] = {"rollout_is_mean": weights.mean()}
    if rollout_is == "sequence":
        log_weights = log_ratio_for_metrics.reshape(len(mask), -1)[rows, 0]
        log_high, log_low = (torch.as_tensor(bound, dtype=log_weights.dtype).log().item() for bound in (high, low))
        metrics["rollout_is_max"] = log_weights.max().clamp(max=SAFETY_BOUND).exp()
        metrics["rollout_is_min"] = log_weights.min().exp()
        metrics["rollout_is_ratio_fraction_high"] = (log_weights > log_high).double().mean()
        metrics["rollout_is_ratio_fraction_low"] = (log_weights < log_low).double().mean()
    else:
        metrics["rollout_is_max"], metrics["rollout_is_min"] = weights.max(), weights.min()
        metrics["rollout_is_ratio_fraction_high"] = (raw > high).double().mean()
        metrics["rollout_is_ratio_fraction_low"] = (raw < low).double().mean()
    bounded = weights.clamp(0.0, high).double()
    metrics["rollout_is_std"] = bounded.std(correction=0)
    metrics["rollout_is_eff_sample_size"] = bounded.mean().square() / bounded.square().mean().clamp(min=1e-30)
    means, raw_means = (masked_mean(w, mask, axis=-1)[rows] for w in (rollout_is_weights, raw_rollout_is_weights))
    metrics["rollout_is_seq_mean"] = means.mean()
    metrics["rollout_is_seq_std"] = means.std() if len(means) > 1 else means.new_zeros(())
    metrics["rollout_is_seq_max"], metrics["rollout_is_seq_min"] = means.max(), means.min()
    metrics["rollout_is_seq_max_deviation"] = (means - 1.0).abs().max()
    # Means of the unbounded weights, because a mean of truncated weights could never exceed the threshold.
    metrics["rollout_is_seq_fraction_high"] = (raw_means > high).double().mean()
    metrics["rollout_is_seq_fraction_low"] = (raw_means < low).double().mean()
    return floats(metrics)
