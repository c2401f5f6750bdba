"""Measures of the mismatch between the sampler's distribution and the trainer's, on the sampled tokens.

Legend: B sequences, T response tokens; log rho = log pi_train - log pi_rollout of a token; L_i the mean log-probability
of sequence i. Sequences without a response token are excluded from all metrics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.functional import EPS
from hybridrl.algorithms.rollout_correction.thresholds import (
    SAFETY_BOUND,
    check_same_shape,
    floats,
    require_tokens,
    safe,
)
from hybridrl.errors import AlgorithmError


@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """Compute perplexities and divergences of the two policies.

    | metric                              | value                                                            |
    |-------------------------------------|------------------------------------------------------------------|
    | training_ppl, training_log_ppl      | mean_i exp(-L_i), mean_i -L_i of the trainer                     |
    | rollout_ppl, rollout_log_ppl        | the same of the sampler                                          |
    | log_ppl_diff, _abs_diff, _max, _min | of L_i(rollout) - L_i(train)                                     |
    | ppl_ratio                           | mean_i exp(L_i(rollout) - L_i(train))                            |
    | kl, k3_kl                           | token means of -log rho and rho - 1 - log rho: KL(rollout, train)|
    | chi2_token, chi2_seq                | mean rho^2 - 1 over tokens; mean_i exp(2 sum log rho) - 1        |

    Args:
        old_log_prob, rollout_log_prob, response_mask: [B, T]; with `rollout_log_prob=None` only the first row.

    Raises:
        AlgorithmError: there is no token, or shapes differ.
    """
    require_tokens(response_mask)
    mask = response_mask.bool()
    outside, lengths = ~mask, mask.sum(-1)
    rows, tokens = lengths > 0, lengths.sum()
    values = torch.empty_like(old_log_prob)  # one array for all sums: large new ones cost more than what is computed

    def zero_outside(log_probs: Tensor) -> Tensor:
        target = values if log_probs.dtype == values.dtype else torch.empty_like(log_probs)
        return target.copy_(log_probs).masked_fill_(outside, 0.0)

    train = (zero_outside(old_log_prob).sum(-1) / (lengths + EPS))[rows]
    metrics = {"training_ppl": (-train).exp().mean(), "training_log_ppl": -train.mean()}
    if rollout_log_prob is None:
        return floats(metrics)
    check_same_shape(old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, response_mask=response_mask)
    rollout = (zero_outside(rollout_log_prob).sum(-1) / (lengths + EPS))[rows]
    log_rho = (old_log_prob - rollout_log_prob).masked_fill_(outside, 0.0)
    values = torch.empty_like(log_rho) if log_rho.dtype != values.dtype else values
    difference = rollout - train

    def token_mean(terms: Tensor) -> Tensor:
        return terms.masked_fill_(outside, 0.0).sum() / (tokens + EPS)

    metrics |= {
        "kl": token_mean(torch.neg(log_rho, out=values)),
        "k3_kl": token_mean(torch.exp(log_rho, out=values).sub_(log_rho).sub_(1.0)),
        "rollout_ppl": (-rollout).exp().mean(),
        "rollout_log_ppl": -rollout.mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": token_mean(values.copy_(log_rho).clamp_(-SAFETY_BOUND, SAFETY_BOUND).exp_().square_()) - 1.0,
        "chi2_seq": (2.0 * safe(log_rho.sum(-1)[rows])).exp().mean() - 1.0,
    }
    return floats(metrics)


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """Apply `compute_offpolicy_metrics` to the current policy and the sampler, under `rollout_corr/`."""
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


@torch.no_grad()
def rollout_probs_diff_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """Compute |p_rollout - p_train| over response tokens and the correlation of the two, under `training/`.

    `rollout_probs_diff_valid` is 1 if there was a token to compare; otherwise it is 0 and the only entry. The others
    are `rollout_probs_diff_{max,mean,std}` and `rollout_actor_probs_pearson_corr`, which is 0 if either side is
    constant.
    """
    check_same_shape(old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, response_mask=response_mask)
    mask = response_mask.bool()
    if not bool(mask.any()):
        return {"training/rollout_probs_diff_valid": 0.0}
    places = mask.flatten().nonzero().squeeze(1)
    p, q = (each.flatten().index_select(0, places).double().exp_() for each in (old_log_prob, rollout_log_prob))
    difference = (p - q).abs_()
    p, q = p.sub_(p.mean()), q.sub_(q.mean())
    product = (p * q).sum()
    spread = (p.square_().sum() * q.square_().sum()).sqrt()
    differences = {
        "diff_max": difference.max(),
        "diff_mean": difference.mean(),
        "diff_std": difference.std() if len(difference) > 1 else difference.new_zeros(()),
    }
    metrics = {f"training/rollout_probs_{name}": value for name, value in floats(differences).items()}
    correlation = torch.where(spread > 0, product / spread.clamp(min=1e-300), 0.0)
    metrics["training/rollout_actor_probs_pearson_corr"] = float(correlation)
    return {"training/rollout_probs_diff_valid": 1.0, **metrics}


@torch.no_grad()
def check_probe(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, threshold: float
) -> dict[str, float]:
    """Stop a run whose sampler and trainer do not hold the same model.

    Call this once, on the first step, with tokens that were sampled with temperature only. With top_p < 1 or top_k > 0
    the sampler's log-probabilities correctly differ from the trainer's, by the probability mass that was kept.

    Args:
        log_prob, rollout_log_prob, response_mask: [B, T] of the probe, both under the same weights and temperature.
        threshold: the largest tolerated mean |log pi_train - log pi_rollout|.

    Returns:
        `rollout_corr/probe_{mean,max}_abs_diff`.

    Raises:
        AlgorithmError: the mean is above the threshold or not finite.
    """
    check_same_shape(log_prob=log_prob, rollout_log_prob=rollout_log_prob, response_mask=response_mask)
    require_tokens(response_mask)
    difference = (log_prob - rollout_log_prob)[response_mask.bool()].double().abs()
    mean, largest = float(difference.mean()), float(difference.max())
    if not mean <= threshold:
        raise AlgorithmError(
            f"the sampler's log-probabilities differ from the trainer's by {mean:.3g} on average (largest "
            f"{largest:.3g}) on {len(difference)} tokens sampled at temperature alone; at most {threshold:g} is "
            "tolerated. The two do not hold the same model: look for weights that were not transferred (LoRA, tied "
            "embeddings), another dtype or quantisation, a chat template or position ids that differ, a temperature "
            "that only one side applies, or an engine that loses more than its weights when it sleeps "
            "(actor_rollout_ref.rollout.sleep_level=1 keeps it)."
        )
    return {"rollout_corr/probe_mean_abs_diff": mean, "rollout_corr/probe_max_abs_diff": largest}
