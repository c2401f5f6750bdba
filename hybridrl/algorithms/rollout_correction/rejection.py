"""Rejection: masking tokens and sequences on which sampler and trainer disagree too much.

Legend: B sequences, T response tokens; log rho = log pi_train - log pi_rollout of a token. Divergence of a token:
k1 = -log rho, k2 = (log rho)^2 / 2, k3 = rho - 1 - log rho.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridrl.algorithms.functional import keep, masked_mean
from hybridrl.algorithms.rollout_correction.thresholds import (
    ROOT,
    check_same_shape,
    floats,
    parse_rs_thresholds,
    require_tokens,
    safe,
)
from hybridrl.algorithms.sequences import Sequences
from hybridrl.errors import AlgorithmError

SUPPORTED_ROLLOUT_RS_OPTIONS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)


def parse_rs_options(rollout_rs: str) -> list[str]:
    """Return the distinct options of `rollout_rs`, a comma-separated string.

    Raises:
        AlgorithmError: an option is unknown, or there is none.
    """
    names = [part.strip() for part in rollout_rs.split(",") if part.strip()] if isinstance(rollout_rs, str) else []
    unknown = [name for name in names if name not in SUPPORTED_ROLLOUT_RS_OPTIONS]
    if unknown or not names:
        raise AlgorithmError(
            f"{ROOT}.rollout_rs is {rollout_rs!r}; it must be one or more of "
            f"{', '.join(SUPPORTED_ROLLOUT_RS_OPTIONS)}, separated by commas, or null."
        )
    return list(dict.fromkeys(names))


def statistic(
    option: str, log_ratio: Tensor, response_mask: Tensor, sequences: Sequences | None = None
) -> tuple[Tensor, bool]:
    """Return the divergence that an option tests: ([B, T], False) for tokens, ([B, 1], True) for sequences.

    Without `sequences` each row is a sequence.
    """
    level, kind = option.rsplit("_", 1)
    whole = sequences or Sequences()
    # The log-ratio is zero outside the mask, so all three divergences are 0 there as well.
    log_rho = safe(keep(log_ratio, response_mask))
    token = {"k1": lambda: -log_rho, "k2": lambda: 0.5 * log_rho**2, "k3": lambda: log_rho.exp() - 1.0 - log_rho}[
        kind
    ]()
    if level == "token":
        return token, False
    if level == "seq_max":
        # k2 and k3 are never negative, so the zeros outside the mask cannot be the maximum.
        return whole.max(token), True
    total = whole.sum(token)
    return (total if level == "seq_sum" else total / whole.sum(response_mask.bool().to(token.dtype)).clamp(min=1)), True


def accepted(option: str, values: Tensor, bounds: tuple[float | None, float]) -> Tensor:
    """Return a mask of the values that pass: log lower <= k1 <= log upper; k2, k3 <= upper."""
    lower, upper = bounds
    if lower is None:
        return values <= upper
    return (values >= math.log(lower)) & (values <= math.log(upper))


@torch.no_grad()
def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: str | float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Remove what a divergence threshold rejects from the response mask (Liu, Li et al. 2025, arXiv 2512.23075).

    | option                   | statistic                                  | rejected                      |
    |--------------------------|--------------------------------------------|-------------------------------|
    | token_k1, k2, k3         | of each token                              | the token                     |
    | seq_sum_k1, k2, k3       | its sum over the sequence's tokens         | the sequence                  |
    | seq_mean_k1, k2, k3      | its mean                                   | the sequence                  |
    | seq_max_k2, k3           | its maximum                                | the sequence                  |

    With several options, separated by commas, all must pass. exp(k1) = pi_rollout / pi_train must lie in the option's
    "lower_upper" (x alone means 1/x_x); k2 and k3 must not exceed a bound.

    Args:
        log_ratio: [B, T] log pi_train - log pi_rollout, clamped to [-20, 20].
        response_mask: [B, T].
        rollout_rs: options, see above.
        rollout_rs_threshold: one for all options, or one per option, separated by commas.

    Returns:
        (mask [B, T] in the dtype of `response_mask`; metrics `rollout_rs_*` with, for each option,
        `rollout_rs_<option>_{mean,max,min,std,fraction_high,...,masked_fraction,seq_masked_fraction}`).

    Raises:
        AlgorithmError: an option is unknown, a threshold is invalid, or there is no token.
    """
    check_same_shape(log_ratio=log_ratio, response_mask=response_mask)
    options = parse_rs_options(rollout_rs)
    thresholds = parse_rs_thresholds(options, rollout_rs_threshold)
    require_tokens(response_mask)
    mask = response_mask.bool()
    rows = mask.any(-1)
    remaining = mask
    metrics: dict[str, float] = {}
    for option in options:
        values, of_sequence = statistic(option, log_ratio, response_mask)
        passes = accepted(option, values, thresholds[option])
        lower, upper = thresholds[option]
        bounds = (math.log(lower), math.log(upper)) if lower is not None else (0.0, upper)
        metrics |= compute_rs_metrics(
            option,
            values.expand_as(mask),
            response_mask,
            rows,
            level="sequence" if of_sequence else "token",
            per_sequence_values=values.squeeze(-1) if of_sequence else None,
            rollout_rs_threshold=bounds[1],
            rollout_rs_threshold_lower=bounds[0],
            apply_lower_threshold=lower is not None,
        )
        metrics |= _masked_fractions(f"rollout_rs_{option}_", mask & ~passes, mask, rows)
        remaining = remaining & passes
    metrics |= _masked_fractions("rollout_rs_", mask & ~remaining, mask, rows)
    return remaining.to(response_mask.dtype), metrics


def _masked_fractions(prefix: str, rejected: Tensor, mask: Tensor, rows: Tensor) -> dict[str, float]:
    """Share of response tokens rejected, and of non-empty sequences with at least one rejected token."""
    tokens, sequences = rejected.sum() / mask.sum(), rejected.any(-1).sum() / rows.sum()
    return floats({f"{prefix}masked_fraction": tokens, f"{prefix}seq_masked_fraction": sequences})


@torch.no_grad()
def compute_rs_metrics(
    option_name: str,
    rs_statistic: Tensor,
    response_mask: Tensor,
    seq_valid_mask: Tensor,
    *,
    level: str,
    per_sequence_values: Tensor | None,
    rollout_rs_threshold: float,
    rollout_rs_threshold_lower: float,
    apply_lower_threshold: bool,
) -> dict[str, float]:
    """Describe the distribution of one option's statistic relative to its thresholds.

    Args:
        option_name: the option, which is part of every metric's name.
        rs_statistic: [B, T] its value at each token (a sequence's value on all its tokens).
        response_mask: [B, T].
        seq_valid_mask: [B] sequences with at least one token.
        level: "token" or "sequence".
        per_sequence_values: [B], or None to take the mean over each sequence's tokens.
        rollout_rs_threshold, rollout_rs_threshold_lower: bounds of the statistic.
        apply_lower_threshold: whether the lower bound rejects.

    Returns:
        `rollout_rs_<option>_{mean,max,min,std,fraction_high,fraction_low}` over tokens (max, min and fractions over
        sequences for a sequence statistic; std of the statistic clamped to the bounds) and
        `rollout_rs_<option>_seq_{mean,std,max,min,max_deviation,fraction_high,fraction_low}` over sequences.

    Raises:
        AlgorithmError: there is no token.
    """
    require_tokens(response_mask)
    high, low = rollout_rs_threshold, rollout_rs_threshold_lower
    mask = response_mask.bool()
    tokens = rs_statistic[mask].double()
    per_sequence = masked_mean(rs_statistic, mask, axis=-1) if per_sequence_values is None else per_sequence_values
    sequences = per_sequence.reshape(-1)[seq_valid_mask.bool()].double()
    own = sequences if level == "sequence" else tokens
    none = tokens.new_zeros(())

    def share_low(values: Tensor) -> Tensor:
        return (values < low).double().mean() if apply_lower_threshold else none

    metrics = {
        "mean": tokens.mean(),
        "max": own.max(),
        "min": own.min(),
        "fraction_high": (own > high).double().mean(),
        "fraction_low": share_low(own),
        "std": tokens.clamp(low if apply_lower_threshold else 0.0, high).std(correction=0),
        "seq_mean": sequences.mean(),
        "seq_std": sequences.std() if len(sequences) > 1 else none,
        "seq_max": sequences.max(),
        "seq_min": sequences.min(),
        "seq_max_deviation": sequences.abs().max(),
        "seq_fraction_high": (sequences > high).double().mean(),
        "seq_fraction_low": share_low(sequences),
    }
    return floats({f"rollout_rs_{option_name}_{name}": value for name, value in metrics.items()})
