"""The mismatch between the sampler's and the trainer's probabilities: its measurement and its correction.

Shapes: B sequences, T response tokens.
"""

from collections.abc import Collection, Mapping

import torch

from hybridrl.algorithms import (
    apply_bypass_mode,
    compute_rollout_correction_and_rejection_mask,
    rollout_probs_diff_metrics,
)
from hybridrl.algorithms.rollout_correction.apply import correction_settings
from hybridrl.algorithms.sessions import sessions_of
from hybridrl.config import RolloutConfig, RolloutCorrectionConfig
from hybridrl.protocol import DataProto
from hybridrl.protocol.fields import Widths, narrow
from hybridrl.protocol.names import MULTI_MODAL_INPUTS, PROMPT_IMAGES
from hybridrl.protocol.sample_names import SampleName, sample_names
from hybridrl.trainer.ppo.health_checks import MISMATCH

#: field with the tokens that rejection keeps, which replaces `response_mask` in the updates. Advantages are estimated
#: from all samples, because the reward of a rejected sample is still a valid part of its group's baseline.
TRAINED_MASK = "trained_mask"
PROBE_ROWS = 32
UNTRUNCATED = {"do_sample": True, "top_p": 1.0, "top_k": -1}


def correct_rollout(
    batch: DataProto, settings: RolloutCorrectionConfig, version: int | None = None
) -> dict[str, float]:
    """Measure the mismatch, and add the fields that the settings ask for: `rollout_is_weights` and `trained_mask`
    [B, T]. The rows of a session are one sequence.

    In bypass mode the sampler's log-probabilities become `old_log_probs`, and the loss does the rest. Without
    `old_log_probs` nothing is done here, because the update measures the mismatch.

    Args:
        version: of the weights that are updated, where generation runs ahead of training. The probabilities of older
            tokens differ by right, so only tokens of this version measure the mismatch; `rollout_corr/k3_kl/age_N` is
            that of tokens N versions older.

    Returns:
        `rollout_corr/*` and `training/rollout_*`.
    """
    fields = batch.batch
    metrics: dict[str, float] = {}
    if "rollout_log_probs" in fields.keys() and "old_log_probs" in fields.keys():
        old, rollout, mask = fields["old_log_probs"], fields["rollout_log_probs"], fields["response_mask"]
        arguments = {} if settings.bypass_mode else correction_settings(settings)
        sessions, width = sessions_of(batch), mask.shape[-1]
        whole = (old, rollout, mask) if sessions is None else tuple(map(sessions.join, (old, rollout, mask)))
        weights, remaining, more = compute_rollout_correction_and_rejection_mask(*whole, **arguments)
        metrics = rollout_probs_diff_metrics(old, rollout, mask) | more
        ages = {0: mask} if version is None else _ages(batch, version)
        if len(ages) > 1 or 0 not in ages:
            metrics = metrics_by_age(old, rollout, ages, metrics)
        if weights is not None:
            factors = weights.batch["rollout_is_weights"]
            fields["rollout_is_weights"] = factors if sessions is None else sessions.split(factors, width)
        if arguments.get("rollout_rs") is not None:
            trained = remaining if sessions is None else sessions.split(remaining, width)
            fields[TRAINED_MASK] = trained.to(mask.dtype)
    if settings.bypass_mode:
        apply_bypass_mode(batch)
    return metrics


def _ages(batch: DataProto, version: int) -> dict[int, torch.Tensor]:
    """Return the mask [B, T] of the tokens of each age, in versions; without versions all are of this one."""
    fields = batch.batch
    mask = fields["response_mask"].bool()
    if "weight_versions" not in fields.keys():
        return {0: mask}
    ages = version - fields["weight_versions"]
    return {int(age): mask & (ages == age) for age in ages[mask].unique().tolist()}


def metrics_by_age(
    old: torch.Tensor, rollout: torch.Tensor, ages: Mapping[int, torch.Tensor], metrics: Mapping[str, float]
) -> dict[str, float]:
    """Return metrics of the mismatch of tokens of the present version, and the divergence of older ones by their age.

    Args:
        old, rollout: log-probabilities [B, T] of trainer and sampler.
        ages: masks [B, T] by age.
        metrics: of all tokens; those that measure a correction are kept.
    """
    fresh = {name: value for name, value in metrics.items() if "_is_" in name or "_rs_" in name}
    for age, mask in ages.items():
        _, _, of_age = compute_rollout_correction_and_rejection_mask(old, rollout, mask.to(old.dtype))
        if age == 0:
            fresh |= of_age | rollout_probs_diff_metrics(old, rollout, mask.to(old.dtype))
        else:
            fresh[f"{MISMATCH}/age_{age}"] = of_age[MISMATCH]
    return fresh


def is_untruncated(rollout: RolloutConfig) -> bool:
    """Whether training samples from the model's own distribution at its temperature."""
    return rollout.do_sample and rollout.top_p == 1 and rollout.top_k < 1


def probe_prompts(batch: DataProto, columns: Collection[str]) -> DataProto:
    """Return the prompts of the first samples. They are answered again to compare sampler and trainer.

    Args:
        batch: as answered. Of a sample in several rows, the first one has the prompt.
        columns: of the prompts; what the answers added is left out.
    """
    first_row: dict[SampleName, int] = {}
    for row, name in enumerate(sample_names(batch)):
        first_row.setdefault(name, row)
    batch = batch.select_idxs(list(first_row.values())[:PROBE_ROWS])
    widths = Widths(batch.batch["prompts"].shape[1], batch.batch["responses"].shape[1])
    prompts = {name: narrow(name, batch.batch[name], widths, 0, 0) for name in ("attention_mask", "position_ids")}
    columns_of_prompts = {name: column for name, column in batch.non_tensor_batch.items() if name in columns}
    if PROMPT_IMAGES in batch.non_tensor_batch:  # images that tools gave were no part of the prompt
        columns_of_prompts[MULTI_MODAL_INPUTS] = batch.non_tensor_batch[PROMPT_IMAGES]
    return DataProto.from_dict(tensors={"input_ids": batch.batch["prompts"], **prompts}, non_tensors=columns_of_prompts)
