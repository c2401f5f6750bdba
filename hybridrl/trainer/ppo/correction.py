"""The sampler against the trainer: how far their probabilities are apart, what is done about it, and when to stop.

Shapes: B sequences, T response tokens.
"""

from typing import TYPE_CHECKING

from hybridrl.algorithms import (
    apply_bypass_mode,
    check_probe,
    compute_rollout_correction_and_rejection_mask,
    rollout_probs_diff_metrics,
)
from hybridrl.algorithms.rollout_correction.apply import correction_settings
from hybridrl.config import RolloutConfig, RolloutCorrectionConfig
from hybridrl.protocol import DataProto

if TYPE_CHECKING:
    from hybridrl.trainer.ppo.trainer import RayPPOTrainer

#: field of the tokens that rejection leaves, which replaces `response_mask` in the updates. Advantages are estimated
#: with all that was sampled: a rejected sample's reward is as good a part of its group's baseline as any.
TRAINED_MASK = "trained_mask"
PROBE_ROWS = 32
UNTRUNCATED = {"do_sample": True, "top_p": 1.0, "top_k": -1}


def correct_rollout(batch: DataProto, settings: RolloutCorrectionConfig) -> dict[str, float]:
    """Measure the mismatch, and add what the settings ask for: `rollout_is_weights` [B, T], `trained_mask` [B, T].

    In bypass mode the sampler's log-probabilities become `old_log_probs`; the loss does the rest. Without
    `old_log_probs` nothing is to be done here: the update measures.

    Returns:
        `rollout_corr/*` and `training/rollout_*`.
    """
    fields = batch.batch
    metrics: dict[str, float] = {}
    if "rollout_log_probs" in fields.keys() and "old_log_probs" in fields.keys():
        old, rollout, mask = fields["old_log_probs"], fields["rollout_log_probs"], fields["response_mask"]
        metrics = rollout_probs_diff_metrics(old, rollout, mask)
        chosen = {} if settings.bypass_mode else correction_settings(settings)
        weights, remaining, found = compute_rollout_correction_and_rejection_mask(old, rollout, mask, **chosen)
        metrics |= found
        if weights is not None:
            fields["rollout_is_weights"] = weights.batch["rollout_is_weights"]
        if chosen.get("rollout_rs") is not None:
            fields[TRAINED_MASK] = remaining.to(mask.dtype)
    if settings.bypass_mode:
        apply_bypass_mode(batch)
    return metrics


def probe_rows(trainer: "RayPPOTrainer", batch: DataProto) -> DataProto | None:
    """A few responses sampled at temperature alone, to compare sampler and trainer on.

    None where the batch's own were sampled so. With top-p or top-k the two differ rightly, by the mass that was kept.

    Args:
        batch: as generated.
    """
    if is_untruncated(trainer.config.actor_rollout_ref.rollout):
        return None
    return trainer.sample(_prompts_of(batch[:PROBE_ROWS]), validate=False, **UNTRUNCATED)


def probe(trainer: "RayPPOTrainer", batch: DataProto, apart: DataProto | None, threshold: float) -> dict[str, float]:
    """Compare sampler and trainer on tokens sampled at temperature alone, under the same weights.

    Args:
        batch: of the first step, as generated; `old_log_probs` where they were computed.
        apart: what `probe_rows` gave.

    Returns:
        `rollout_corr/probe_*`.

    Raises:
        AlgorithmError: they differ by more than `threshold`: not the same model.
    """
    rows = batch if apart is None else apart
    if "old_log_probs" not in rows.batch.keys():
        rows = rows[:PROBE_ROWS]
        rows = rows.union(trainer.compute_log_prob(rows))
    fields = rows.batch
    return check_probe(fields["old_log_probs"], fields["rollout_log_probs"], fields["response_mask"], threshold)


def is_untruncated(rollout: RolloutConfig) -> bool:
    """Whether training samples from the model's own distribution at its temperature."""
    return rollout.do_sample and rollout.top_p == 1 and rollout.top_k < 1


def _prompts_of(batch: DataProto) -> DataProto:
    """What the responses were generated from."""
    width = batch.batch["prompts"].shape[1]
    return DataProto.from_dict(
        tensors={
            "input_ids": batch.batch["prompts"],
            "attention_mask": batch.batch["attention_mask"][:, :width],
            "position_ids": batch.batch["position_ids"][:, :width],
        },
        non_tensors=dict(batch.non_tensor_batch),
    )
