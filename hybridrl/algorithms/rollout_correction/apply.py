"""Rollout correction of a whole batch: weights, rejection and metrics in one call, and bypass mode.

Legend: B sequences, T response tokens. `batch` arguments are a DataProto or anything with its `batch` mapping.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hybridrl.algorithms.config_access import has_setting, setting
from hybridrl.algorithms.rollout_correction.importance_weights import compute_rollout_correction_weights
from hybridrl.algorithms.rollout_correction.mismatch import compute_offpolicy_metrics
from hybridrl.algorithms.rollout_correction.rejection import compute_rollout_rejection_mask
from hybridrl.algorithms.rollout_correction.thresholds import ROOT, check_same_shape, require_tokens
from hybridrl.errors import AlgorithmError
from hybridrl.registry import POLICY_LOSSES

if TYPE_CHECKING:
    from tensordict import TensorDict

LOSS_TYPES = ("ppo_clip", "reinforce")
DEFAULT_LOSS, BYPASS_LOSS = "vanilla", "bypass_mode"


@dataclass
class WeightsBatch:
    """The importance weights in the shape of a DataProto: `.batch["rollout_is_weights"]`."""

    batch: TensorDict
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


def correction_settings(config: Any) -> dict[str, Any]:
    """The keys of `algorithm.rollout_correction` that `compute_rollout_correction_and_rejection_mask` takes."""
    defaults = {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
    }
    # A null is passed on, not replaced: a null threshold is refused where a threshold is needed.
    return {
        name: setting(config, name, None, who="rollout correction", root=ROOT) if has_setting(config, name) else value
        for name, value in defaults.items()
    }


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: str | float | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
) -> tuple[WeightsBatch | None, Tensor, dict[str, float]]:
    """Compute importance weights, the response mask after rejection, and metrics of the two policies' mismatch.

    Weights cover all sampled tokens; rejection does not change them. With neither `rollout_is` nor `rollout_rs` only
    the mismatch is measured.

    Args:
        old_log_prob: [B, T] log-probabilities of the trainer's policy.
        rollout_log_prob: [B, T] those of the sampler.
        response_mask: [B, T].
        rollout_is, rollout_is_threshold, rollout_is_batch_normalize: see `compute_rollout_correction_weights`.
        rollout_rs, rollout_rs_threshold: see `compute_rollout_rejection_mask`.

    Returns:
        (weights or None, mask [B, T], metrics under `rollout_corr/`). The weights are in
        `.batch["rollout_is_weights"]` of an object with a DataProto's three fields.

    Raises:
        AlgorithmError: there is no token, shapes differ, or settings are out of range.
    """
    check_same_shape(old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, response_mask=response_mask)
    require_tokens(response_mask)
    log_ratio = old_log_prob - rollout_log_prob
    metrics: dict[str, float] = {}
    weights = None
    if rollout_is is not None:
        tensor, weight_metrics = compute_rollout_correction_weights(
            log_ratio, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        from tensordict import TensorDict  # as slow to import as torch, and needed only here

        weights = WeightsBatch(TensorDict({"rollout_is_weights": tensor}, batch_size=[len(tensor)]))
        metrics |= weight_metrics
    mask = response_mask.clone()
    if rollout_rs is not None:
        mask, rejection_metrics = compute_rollout_rejection_mask(
            log_ratio, response_mask, rollout_rs, rollout_rs_threshold
        )
        metrics |= rejection_metrics
    metrics |= compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    return weights, mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def compute_rollout_correction_and_add_to_batch(batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, float]]:
    """Correct a batch before its advantages are used: rejection changes `response_mask`, weights are added.

    Args:
        batch: its `batch` mapping holds `old_log_probs, rollout_log_probs, response_mask`; it receives
            `rollout_is_weights` if `rollout_is` is set, and a new `response_mask`. No tensor is modified in place.
        rollout_corr_config: `algorithm.rollout_correction`.

    Returns:
        (the same batch, metrics under `rollout_corr/`)

    Raises:
        AlgorithmError: the batch has no rollout log-probabilities, or the correction fails.
    """
    fields = batch.batch
    _require_rollout_log_probs(fields, "rollout correction")
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        fields["old_log_probs"],
        fields["rollout_log_probs"],
        fields["response_mask"],
        **correction_settings(rollout_corr_config),
    )
    fields["response_mask"] = mask
    if weights is not None:
        fields["rollout_is_weights"] = weights.batch["rollout_is_weights"]
    return batch, metrics


def _require_rollout_log_probs(fields: Mapping[str, Any], who: str) -> None:
    if "rollout_log_probs" not in fields.keys():
        raise AlgorithmError(
            f"{who} needs the sampler's log-probabilities, but the batch has no rollout_log_probs. Every "
            "rollout returns them; keep the field."
        )


def effective_loss_mode(loss_mode: str, rollout_corr_config: Any) -> str:
    """Return the policy loss that an actor runs: `bypass_mode` if the rollout correction enables it, else `loss_mode`.

    Call it where the loss is looked up, in the training process, because a config changed elsewhere is not visible
    there.

    Raises:
        AlgorithmError: bypass mode is combined with another loss_mode, or the `loss_type` is unknown.
    """
    if not setting(rollout_corr_config, "bypass_mode", False, who="rollout correction", root=ROOT):
        return loss_mode
    loss_type = setting(rollout_corr_config, "loss_type", "ppo_clip", who="bypass mode", root=ROOT)
    if loss_type not in LOSS_TYPES:
        raise AlgorithmError(f"{ROOT}.loss_type is {loss_type!r}; choose from {', '.join(LOSS_TYPES)}.")
    if loss_mode != DEFAULT_LOSS and not POLICY_LOSSES.metadata(loss_mode).samplers_old:
        raise AlgorithmError(
            f"{ROOT}.bypass_mode=True replaces the policy loss, but actor_rollout_ref.actor.policy_loss.loss_mode is "
            f"{loss_mode!r}. Leave it at {DEFAULT_LOSS}, or turn bypass_mode off."
        )
    return BYPASS_LOSS


def apply_bypass_mode(batch: Any, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> None:
    """Use the sampler's log-probabilities as the old ones, and select the matching loss.

    `batch.batch["old_log_probs"]` becomes `rollout_log_probs`; `policy_loss_config` gets
    `loss_mode=bypass_mode` and `rollout_correction`. If the actor has its own copy of the settings, use
    `effective_loss_mode` there instead.

    Raises:
        AlgorithmError: the batch has no rollout log-probabilities.
    """
    _require_rollout_log_probs(batch.batch, "bypass mode")
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    if policy_loss_config is None:
        return
    mode = setting(policy_loss_config, "loss_mode", DEFAULT_LOSS, who="bypass mode")
    # Calling apply_bypass_mode is the decision to bypass, regardless of the flag in the settings.
    for name, value in (
        ("loss_mode", effective_loss_mode(mode, {"bypass_mode": True, **_loss_type(rollout_corr_config)})),
        ("rollout_correction", rollout_corr_config),
    ):
        if isinstance(policy_loss_config, MutableMapping):
            policy_loss_config[name] = value
        else:
            setattr(policy_loss_config, name, value)


def _loss_type(rollout_corr_config: Any) -> dict[str, str]:
    return {"loss_type": setting(rollout_corr_config, "loss_type", "ppo_clip", who="bypass mode", root=ROOT)}
