"""The mismatch between the sampler's and the trainer's probabilities: its measurement and its correction.

Shapes: B sequences, T response tokens.
"""

from collections.abc import Collection

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

#: field with the tokens that rejection keeps, which replaces `response_mask` in the updates. Advantages are estimated
#: from all samples, because the reward of a rejected sample is still a valid part of its group's baseline.
TRAINED_MASK = "trained_mask"
PROBE_ROWS = 32
UNTRUNCATED = {"do_sample": True, "top_p": 1.0, "top_k": -1}


def correct_rollout(batch: DataProto, settings: RolloutCorrectionConfig) -> dict[str, float]:
    """Measure the mismatch, and add the fields that the settings ask for: `rollout_is_weights` and `trained_mask`
    [B, T]. The rows of a session are one sequence.

    In bypass mode the sampler's log-probabilities become `old_log_probs`, and the loss does the rest. Without
    `old_log_probs` nothing is done here, because the update measures the mismatch.

    Returns:
        `rollout_corr/*` and `training/rollout_*`.
    """
    fields = batch.batch
    metrics: dict[str, float] = {}
    if "rollout_log_probs" in fields.keys() and "old_log_probs" in fields.keys():
        old, rollout, mask = fields["old_log_probs"], fields["rollout_log_probs"], fields["response_mask"]
        metrics = rollout_probs_diff_metrics(old, rollout, mask)
        arguments = {} if settings.bypass_mode else correction_settings(settings)
        sessions, width = sessions_of(batch), mask.shape[-1]
        whole = (old, rollout, mask) if sessions is None else tuple(map(sessions.join, (old, rollout, mask)))
        weights, remaining, more = compute_rollout_correction_and_rejection_mask(*whole, **arguments)
        metrics |= more
        if weights is not None:
            factors = weights.batch["rollout_is_weights"]
            fields["rollout_is_weights"] = factors if sessions is None else sessions.split(factors, width)
        if arguments.get("rollout_rs") is not None:
            trained = remaining if sessions is None else sessions.split(remaining, width)
            fields[TRAINED_MASK] = trained.to(mask.dtype)
    if settings.bypass_mode:
        apply_bypass_mode(batch)
    return metrics


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
