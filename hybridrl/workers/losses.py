"""The loss functions that workers hand to an engine.

Each returns one micro-batch's share of the mini-batch's loss: it is normalised by the counts of the whole mini-batch,
over all ranks, so that shares add up to the same loss and gradient however the mini-batch was split.

Shapes: B sequences, T response tokens.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from hybridrl.algorithms import agg_loss, compute_value_loss, get_policy_loss_fn, kl_penalty
from hybridrl.config import ActorConfig, CriticConfig
from hybridrl.protocol import DataProto
from hybridrl.utils.metrics import Metric

LossFn = Callable[[dict[str, torch.Tensor], DataProto], tuple[torch.Tensor, dict[str, Any]]]


def global_counts(meta_info: dict[str, Any], loss_scale_factor: float | None) -> dict[str, Any]:
    """The normalisers of a mini-batch as `agg_loss` takes them.

    dp_size is 1: the engine undoes FSDP's averaging itself. `seq-mean-token-sum-norm` divides by the limit of response
    lengths where no factor is set, not by the width that a micro-batch happens to have.
    """
    return {
        "dp_size": 1,
        "batch_num_tokens": meta_info["batch_num_tokens"],
        "global_batch_size": meta_info["global_batch_size"],
        "loss_scale_factor": loss_scale_factor or meta_info["response_length"],
    }


def policy_loss_fn(config: ActorConfig) -> LossFn:
    """Policy gradient loss, entropy bonus and KL loss of one micro-batch.

        L = L_pg - entropy_coeff * agg(H) + kl_loss_coef * agg(KL(pi || pi_ref))

    The batch holds `advantages`, `response_mask`, and where the setting needs them `old_log_probs`, `ref_log_prob`,
    `rollout_is_weights` (all [B, T]). Without `old_log_probs` the update is on-policy by construction (one update a
    batch): the detached current log-probabilities stand for them.
    """
    policy_loss = get_policy_loss_fn(config.policy_loss.loss_mode)

    def loss_fn(outputs: dict[str, torch.Tensor], batch: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
        tensors = batch.batch
        mask = tensors["response_mask"]
        log_prob = outputs["log_probs"]
        counts = global_counts(batch.meta_info, config.loss_scale_factor)
        old_log_prob = tensors.get("old_log_probs", None)
        metrics: dict[str, Any] = {}
        if old_log_prob is None:
            old_log_prob = log_prob.detach()
            if "rollout_log_probs" in tensors.keys():
                metrics |= _mismatch(old_log_prob, tensors["rollout_log_probs"], mask)
        settings = SimpleNamespace(**vars(config), global_batch_info=counts)
        loss, policy_metrics = policy_loss(
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=tensors["advantages"],
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            config=settings,
            rollout_is_weights=tensors.get("rollout_is_weights", None),
        )
        metrics |= policy_metrics
        metrics["actor/pg_loss"] = Metric(loss.detach(), kind="sum")
        if "entropy" in outputs:
            entropy = outputs["entropy"]
            metrics["actor/entropy"] = _token_mean(entropy, mask)
            if config.entropy_coeff != 0:
                entropy_loss = agg_loss(entropy, mask, config.loss_agg_mode, **counts)
                metrics["actor/entropy_loss"] = Metric(entropy_loss.detach(), kind="sum")
                loss = loss - config.entropy_coeff * entropy_loss
        if config.use_kl_loss:
            divergence = kl_penalty(log_prob, tensors["ref_log_prob"], config.kl_loss_type)
            kl_loss = agg_loss(divergence, mask, config.loss_agg_mode, **counts)
            metrics["actor/kl_loss"] = Metric(kl_loss.detach(), kind="sum")
            metrics["actor/kl_coef"] = config.kl_loss_coef
            loss = loss + config.kl_loss_coef * kl_loss
        metrics["actor/loss"] = Metric(loss.detach(), kind="sum")
        return loss, metrics

    return loss_fn


def value_loss_fn(config: CriticConfig) -> LossFn:
    """Clipped value loss of one micro-batch; it holds `values` (of before the update), `returns`, `response_mask`."""

    def loss_fn(outputs: dict[str, torch.Tensor], batch: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
        tensors = batch.batch
        mask = tensors["response_mask"]
        values = outputs["values"]
        loss, clipped = compute_value_loss(
            vpreds=values,
            returns=tensors["returns"],
            values=tensors["values"],
            response_mask=mask,
            cliprange_value=config.cliprange_value,
            loss_agg_mode=config.loss_agg_mode,
            **global_counts(batch.meta_info, config.loss_scale_factor),
        )
        metrics = {
            "critic/vf_loss": Metric(loss.detach(), kind="sum"),
            "critic/vf_clipfrac": clipped.detach(),
            "critic/vpred_mean": _token_mean(values, mask),
        }
        return loss, metrics

    return loss_fn


def _mismatch(log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """How far the sampler's probabilities are from the trainer's on the same tokens: |pi - pi_rollout|.

    The trainer computes more of it where it has both log-probabilities of the whole batch:
    `rollout_probs_diff_metrics`.
    """
    with torch.no_grad():
        difference = torch.where(mask.bool(), (log_probs.exp() - rollout_log_probs.exp()).abs(), 0.0)
        return {
            "training/rollout_probs_diff_mean": _token_mean(difference, mask),
            "training/rollout_probs_diff_max": Metric(difference.max(), kind="max"),
        }


def _token_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = torch.where(mask.bool(), values.detach(), 0.0)
    return kept.sum() / mask.sum().clamp(min=1)
