"""Correction for samples drawn by a policy other than the one that is trained.

The sampler may run in a different precision, on older weights, or with different kernels. Its log-probabilities are
compared with the trainer's in every run (`mismatch`). Optionally, the loss is weighted (`weights`) or tokens and
sequences are left out (`rejection`). docs/algorithms.md explains when to use which.
"""

from hybridrl.algorithms.rollout_correction.apply import (
    apply_bypass_mode,
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_and_rejection_mask,
    effective_loss_mode,
)
from hybridrl.algorithms.rollout_correction.importance_weights import (
    compute_is_metrics,
    compute_rollout_correction_weights,
)
from hybridrl.algorithms.rollout_correction.mismatch import (
    check_probe,
    compute_offpolicy_metrics,
    compute_rollout_corr_metrics_from_logprobs,
    rollout_probs_diff_metrics,
)
from hybridrl.algorithms.rollout_correction.presets import PRESETS, RolloutCorrection, rollout_correction_preset
from hybridrl.algorithms.rollout_correction.rejection import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    compute_rollout_rejection_mask,
    compute_rs_metrics,
)
from hybridrl.algorithms.rollout_correction.thresholds import SAFETY_BOUND

__all__ = [
    "PRESETS",
    "SAFETY_BOUND",
    "SUPPORTED_ROLLOUT_RS_OPTIONS",
    "RolloutCorrection",
    "apply_bypass_mode",
    "check_probe",
    "compute_is_metrics",
    "compute_offpolicy_metrics",
    "compute_rollout_corr_metrics_from_logprobs",
    "compute_rollout_correction_and_add_to_batch",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "compute_rs_metrics",
    "effective_loss_mode",
    "rollout_correction_preset",
    "rollout_probs_diff_metrics",
]
