"""The loss of bypass mode: the sampler's log-probabilities are the old ones, and the correction is part of the loss.

Legend: B sequences of a micro-batch, T response tokens; log rho = log pi - log pi_rollout of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.aggregation import total_tokens_match
from hybridrl.algorithms.algorithm_registry import register_policy_loss
from hybridrl.algorithms.config_access import counts_of, setting
from hybridrl.algorithms.functional import keep, masked_mean
from hybridrl.algorithms.policy_losses.soft import reinforce
from hybridrl.algorithms.policy_losses.tokens import Metrics
from hybridrl.algorithms.policy_losses.vanilla import compute_policy_loss_vanilla
from hybridrl.algorithms.rollout_correction.apply import LOSS_TYPES, correction_settings
from hybridrl.algorithms.rollout_correction.importance_weights import bounded_weights, raw_weights, weights_mean
from hybridrl.algorithms.rollout_correction.rejection import accepted, parse_rs_options, statistic
from hybridrl.algorithms.rollout_correction.thresholds import ROOT, parse_is_threshold, parse_rs_thresholds, safe
from hybridrl.algorithms.sequences import Sequences, WholeSequences, sequences_of
from hybridrl.errors import AlgorithmError


def _settings(config: Any) -> tuple[dict[str, Any], str]:
    """(correction settings, loss type) of `policy_loss.rollout_correction`."""
    correction = setting(config, "policy_loss.rollout_correction", None, who="policy loss bypass_mode")
    loss_type = setting(correction, "loss_type", "ppo_clip", who="policy loss bypass_mode", root=ROOT)
    if loss_type not in LOSS_TYPES:
        raise AlgorithmError(f"{ROOT}.loss_type is {loss_type!r}; choose from {', '.join(LOSS_TYPES)}.")
    return correction_settings(correction), loss_type


def needs_preparation(config: Any) -> bool:
    """Whether the loss needs the preliminary pass: only weights normalised over the mini-batch do."""
    correction, loss_type = _settings(config)
    return (
        loss_type == "reinforce"
        and correction["rollout_is"] is not None
        and bool(correction["rollout_is_batch_normalize"])
    )


def reads_whole_sequences(config: Any) -> bool:
    """Whether weights, rejection or the number of tokens that remain are those of whole sequences."""
    correction, loss_type = _settings(config)
    options = [] if correction["rollout_rs"] is None else parse_rs_options(correction["rollout_rs"])
    rejects = any(not option.startswith("token_") for option in options)
    weighs = loss_type == "reinforce" and correction["rollout_is"] == "sequence"
    return rejects or weighs or _counts_remaining(correction, config)


def _counts_remaining(correction: Mapping[str, Any], config: Any) -> bool:
    """Whether the loss divides by the number of tokens of a sequence that are not rejected."""
    mode = setting(config, "loss_agg_mode", "seq-mean-token-mean", who="policy loss bypass_mode")
    return correction["rollout_rs"] is not None and mode == "seq-mean-token-mean"


@torch.no_grad()
def _weights(log_ratio: Tensor, mask: Tensor, correction: dict[str, Any], sequences: Sequences) -> Tensor:
    upper, lower = parse_is_threshold(correction["rollout_is_threshold"])
    raw, _ = raw_weights(log_ratio, mask, correction["rollout_is"], sequences)
    return bounded_weights(raw, upper, lower)


@torch.no_grad()
def prepare_bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    seed: int,
    row_ids: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """Compute importance weights normalised over the whole mini-batch, [B, T]; see `needs_preparation`.

    `old_log_prob` is the sampler's; `sequence_ids` [B] is the sequence of each row, None if each row is one;
    `advantages`, `seed` and `row_ids` are not used.
    """
    correction, _ = _settings(config)
    sequences = Sequences() if sequence_ids is None else WholeSequences(sequence_ids)
    weights = _weights(log_prob - old_log_prob, response_mask, correction, sequences)
    return weights / weights_mean(weights, response_mask, correction["rollout_is"], sequences)


@torch.no_grad()
def _remaining(
    log_ratio: Tensor, mask: Tensor, correction: dict[str, Any], sequences: Sequences
) -> tuple[Tensor, Tensor, Metrics]:
    """Return the response mask without rejected tokens and sequences, [B, T] bool; the mask without rejected tokens
    alone; and each option's rejected share.
    """
    remaining, by_token, metrics = mask, mask, {}
    options = [] if correction["rollout_rs"] is None else parse_rs_options(correction["rollout_rs"])
    thresholds = parse_rs_thresholds(options, correction["rollout_rs_threshold"]) if options else {}
    for option, bounds in thresholds.items():
        values, of_sequence = statistic(option, log_ratio, mask, sequences)
        passes = accepted(option, values, bounds)
        rejected = (~passes).expand_as(mask).to(log_ratio.dtype)
        metrics[f"rollout_corr/rollout_rs_{option}_masked_fraction"] = masked_mean(rejected, mask)
        remaining = remaining & passes
        by_token = by_token if of_sequence else by_token & passes
    return remaining, by_token, metrics


@register_policy_loss(
    "bypass_mode",
    samplers_old=True,
    prepare=prepare_bypass_mode,
    prepare_needed=needs_preparation,
    whole_sequences=reads_whole_sequences,
)
def compute_policy_loss_bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    prepared: Tensor | None = None,
    counts: Mapping[str, Any] | None = None,
    sequences: Sequences | None = None,
) -> tuple[Tensor, Metrics]:
    """Two policies instead of three (Liu, Li et al. 2025, "When speed kills stability"): rho = pi / pi_rollout.

        ppo_clip:   the vanilla clipped loss with this rho, which is itself the correction, without a further weight
        reinforce:  -w A log pi with importance weights w of the current policy

    over the tokens that are not rejected. Rejected tokens remain in the counts by which the loss is divided, because
    they are not known before the update. The result therefore does not depend on the split.

    Settings: `policy_loss.rollout_correction` with `loss_type` and the keys of `algorithm.rollout_correction`;
    for ppo_clip also those of the vanilla loss.

    Args:
        old_log_prob: [B, T] the sampler's log-probabilities.
        rollout_is_weights: not used; the weights are recomputed from the current policy.
        prepared: [B, T] rows of `prepare_bypass_mode`, for weights that are normalised over the mini-batch.
        sequences: sums over whole sequences, where they have several rows.

    Metrics: those of the loss, with rejected tokens counted as 0, and token means `rollout_corr/{kl,k3_kl,chi2_token}`,
    `rollout_corr/rollout_is_{mean,square_mean}` (the effective sample size is mean^2 / square_mean),
    `rollout_corr/rollout_rs_masked_fraction` and, for each option, `rollout_rs_<option>_masked_fraction`; the
    largest weight is `rollout_corr/rollout_is_max`.
    """
    correction, loss_type = _settings(config)
    mask = response_mask.bool()
    log_ratio = keep(log_prob.detach() - old_log_prob, mask)
    loss_counts = counts_of(counts, config)
    whole = sequences_of(sequences, "sequence_lengths" in loss_counts, "policy loss bypass_mode")
    remaining, by_token, rejected = _remaining(log_ratio, mask, correction, whole)
    all_counts = {"batch_num_tokens": mask.sum(), "global_batch_size": mask.any(-1).sum(), **loss_counts}
    if _counts_remaining(correction, config) and (sequences is not None or "sequence_lengths" in loss_counts):
        # Of a sequence that is not rejected as a whole. The others have no token left, whatever their length.
        all_counts["sequence_lengths"] = whole.sum(by_token.to(log_ratio.dtype)).squeeze(-1)
    metrics: Metrics = {
        "rollout_corr/kl": masked_mean(-log_ratio, mask),
        "rollout_corr/k3_kl": masked_mean(safe(log_ratio).exp() - 1.0 - log_ratio, mask),
        "rollout_corr/chi2_token": masked_mean(safe(log_ratio).exp().square() - 1.0, mask),
        "rollout_corr/rollout_rs_masked_fraction": masked_mean((~remaining).to(log_ratio.dtype), mask),
        **rejected,
    }
    # The loss's metrics are means over the remaining tokens; rescaled to all tokens, they merge exactly.
    share = remaining.sum() / mask.sum().clamp(min=1)
    if loss_type == "ppo_clip":
        loss, more = compute_policy_loss_vanilla(
            old_log_prob, log_prob, advantages, remaining, loss_agg_mode, config, None, counts=all_counts
        )
        return loss, metrics | {name: value * share for name, value in more.items()}
    weights = None
    if correction["rollout_is"] is not None:
        weights = _weights(log_ratio, mask, correction, whole) if prepared is None else prepared
        if correction["rollout_is_batch_normalize"] and prepared is None:
            if not total_tokens_match(mask, loss_counts.get("batch_num_tokens")):
                raise AlgorithmError(
                    f"{ROOT}.rollout_is_batch_normalize divides by a mean over the whole mini-batch, but this call "
                    "holds a part of it. Run get_policy_loss_prepare_fn('bypass_mode', config) on the mini-batch and "
                    "pass each part its rows as prepared=."
                )
            weights = weights / weights_mean(weights, mask, correction["rollout_is"], whole)
        metrics["rollout_corr/rollout_is_mean"] = masked_mean(weights, mask)
        metrics["rollout_corr/rollout_is_square_mean"] = masked_mean(weights.square(), mask)
        metrics["rollout_corr/rollout_is_max"] = keep(weights, mask).max()
    loss, more = reinforce(
        old_log_prob, log_prob, advantages, remaining, loss_agg_mode, config, weights, counts=all_counts
    )
    return loss, metrics | {name: value * share for name, value in more.items()}
