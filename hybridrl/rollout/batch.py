"""Conversion of batches: the requests of a batch of prompts, and the batch of the resulting trajectories.

Shapes: B rows, P prompt width (left-padded), T response width (right-padded).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from hybridrl.config import RolloutConfig
from hybridrl.errors import RolloutError
from hybridrl.models.vision import is_vision_model
from hybridrl.protocol import DataProto, bookkeeping, object_array
from hybridrl.protocol.bookkeeping import Writer
from hybridrl.protocol.names import (
    IMAGE_MASK,
    MULTI_MODAL_INPUTS,
    ROUTED_EXPERTS,
    TRAJECTORY_REWARD,
    TURN_LEVEL_REWARDS,
    TURN_STATES,
)
from hybridrl.protocol.sample_names import request_names
from hybridrl.rollout.noise import purpose_of, stream_keys
from hybridrl.rollout.request import Request
from hybridrl.rollout.request_images import PromptImages
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.rollout.trajectory import NO_VERSION, Trajectory


def prompt_ids_of(prompts: DataProto) -> list[list[int]]:
    """The prompt of each row without padding."""
    is_real = prompts.batch["attention_mask"].bool()
    ids, ends = prompts.batch["input_ids"][is_real].tolist(), is_real.sum(dim=1).cumsum(dim=0).tolist()
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def images_of(prompts: DataProto, model: PreTrainedConfig, most: int | None = None) -> list[PromptImages | None]:
    """The images of each row; None for rows without any.

    Args:
        model: configuration of the model that reads them.
        most: images of a row (`rollout.limit_images`); None: any number.

    Raises:
        RolloutError: a row has more or fewer placeholders than its images have tokens, or too many images.
    """
    if not is_vision_model(model):
        return [None] * len(prompts)
    column = prompts.non_tensor_batch.get(MULTI_MODAL_INPUTS)
    rows = [{}] * len(prompts) if column is None else [entry or {} for entry in column.tolist()]
    row_images = [
        PromptImages.of(ids, tensors, model, f"prompt {row} of the batch")
        for row, (ids, tensors) in enumerate(zip(prompt_ids_of(prompts), rows, strict=True))
    ]
    for row, images in enumerate(row_images):
        if images is not None and most is not None and len(images.places) > most:
            raise RolloutError(
                f"prompt {row} of the batch has {len(images.places)} images, and the engine was started for prompts of "
                f"actor_rollout_ref.rollout.limit_images={most}; set limit_images={len(images.places)} or null"
            )
    return row_images


def requests_of(
    prompts: DataProto,
    config: RolloutConfig,
    next_id: Callable[[], int],
    images: Sequence[PromptImages | None] | None = None,
) -> list[Request]:
    """One request per row of a batch as `Rollout.generate` takes it.

    Args:
        next_id: returns a number that no other request has.
        images: of each row (`images_of`); None: of none.
    """
    meta = prompts.meta_info
    params = SamplingParams.from_meta(config, meta)
    rows = len(prompts)
    names = request_names(prompts)
    uids, samples = [name.uid for name in names], [name.sample for name in names]
    step = int(meta.get("global_steps", 0))
    purpose = purpose_of(meta)
    seeds: list[int | None] = [None] * rows
    if (config.full_determinism or meta.get("seeded", False)) and params.do_sample:
        seeds = [int(key) % 2**63 for key in stream_keys(config.seed, step, purpose, uids, samples)]
    return [
        Request(
            id=f"{purpose.replace(' ', '-')}-{step}-{next_id()}",
            prompt_ids=prompt_ids,
            sampling=params if seed is None else replace(params, seed=seed),
            session=uid,
            images=own,
            routing=bool(meta.get(ROUTED_EXPERTS, False)),
        )
        for prompt_ids, uid, seed, own in zip(prompt_ids_of(prompts), uids, seeds, images or [None] * rows, strict=True)
    ]


def batch_of(
    trajectories: Sequence[Trajectory],
    pad_token_id: int,
    prompt_width: int | None = None,
    response_width: int | None = None,
    prompt_positions: torch.Tensor | None = None,
) -> DataProto:
    """One row per trajectory, in their order; a sample may have any number of rows.

    Args:
        trajectories: where there are none, both widths must be given.
        pad_token_id: fills prompts on the left and responses on the right.
        prompt_width: P; None takes the longest prompt.
        response_width: T; None takes the longest response.
        prompt_positions: of the prompts' tokens, [B, P], or [B, k, P] with k positions per token; None counts them, or
            takes those of the trajectories.

    Returns:
        Tensors `prompts` [B, P], `responses`, `response_mask` (the trajectories' masks, holes included),
        `rollout_log_probs`, `weight_versions` [B, T], and `input_ids`, `attention_mask` (all tokens, those of tools
        included), `position_ids` [B, P + T] or [B, k, P + T]. Where trajectories have them, `routed_experts`
        [B, P + T, L, K], 0 on padding, and `image_mask` [B, P + T]. Where any has `turn_ends`, `turn_level_rewards` and
        `turn_states` [B, T], the values of turns at their last tokens, 0 elsewhere.
        Non-tensors `uid` and `sample`, each extra field (None in rows without it), and, where any trajectory has one,
        `session_id` with `trajectory_index`, `trajectory_reward` (None leaves the row to the reward function),
        `turn_rewards` and `multi_modal_inputs`.

    Raises:
        RolloutError: a trajectory is longer than the width that was asked for, has an extra field with the name of a
            column above, or has no experts where others have them.
    """
    rows = len(trajectories)
    before = _width("prompt_ids", "prompt_width", prompt_width, trajectories)
    after = _width("token_ids", "response_width", response_width, trajectories)
    shape = rows, after
    prompts = np.full((rows, before), pad_token_id, dtype=np.int64)
    _place([trajectory.prompt_ids for trajectory in trajectories], prompts, at_end=True)
    responses, response_mask = np.full(shape, pad_token_id, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    _place([trajectory.token_ids for trajectory in trajectories], responses)
    _place([trajectory.mask for trajectory in trajectories], response_mask)
    log_probs = np.zeros(shape, dtype=np.float32)
    _place([trajectory.log_probs for trajectory in trajectories], log_probs)
    attention = np.zeros((rows, before + after), dtype=np.int64)
    for row, trajectory in enumerate(trajectories):
        length = len(trajectory.token_ids)
        log_probs[row, :length][response_mask[row, :length] == 0] = 0.0
        attention[row, before - len(trajectory.prompt_ids) : before + length] = 1
    attention_mask = torch.from_numpy(attention)
    if prompt_positions is None:
        # Padding on the right counts on, so that the positions of a row do not depend on its length.
        prompt_lengths = np.array([len(trajectory.prompt_ids) for trajectory in trajectories], dtype=np.int64)
        positions = np.arange(before + after) - (before - np.maximum(prompt_lengths, 1))[:, None]
        default_positions = torch.from_numpy(np.maximum(positions, 0, out=positions))
    else:
        further = prompt_positions[..., -1:] + 1 + torch.arange(after)
        default_positions = torch.cat([prompt_positions, further], dim=-1)
    tensors = {
        "prompts": torch.from_numpy(prompts),
        "responses": torch.from_numpy(responses),
        "input_ids": torch.from_numpy(np.concatenate([prompts, responses], axis=1)),
        "attention_mask": attention_mask,
        "position_ids": _positions(trajectories, before, after, default_positions),
        "response_mask": torch.from_numpy(response_mask),
        "rollout_log_probs": torch.from_numpy(log_probs),
        "weight_versions": _versions(trajectories, after),
    }
    if any(trajectory.turn_ends is not None for trajectory in trajectories):
        tensors |= _turns(trajectories, after)
    if any(trajectory.image_mask is not None for trajectory in trajectories):
        tensors[IMAGE_MASK] = _image_mask(trajectories, attention_mask.bool())
    if any(trajectory.routed_experts is not None for trajectory in trajectories):
        tensors[ROUTED_EXPERTS] = _experts(trajectories, attention_mask.bool())
    return DataProto.from_dict(tensors=tensors, non_tensors=columns_of(trajectories, tensors.keys()))


def _place(lists: Iterable[Sequence[Any] | np.ndarray], padding: np.ndarray, at_end: bool = False) -> None:
    """Write each list into its row of `padding` [B, W], at the row's start or end."""
    for row, values in zip(padding, lists, strict=True):
        first = len(row) - len(values) if at_end else 0
        row[first : first + len(values)] = values


def _versions(trajectories: Sequence[Trajectory], width: int) -> torch.Tensor:
    """`weight_versions` of `batch_of`."""
    versions = np.full((len(trajectories), width), NO_VERSION, dtype=np.int32)
    for row, trajectory in zip(versions, trajectories, strict=True):
        first = 0
        for version, tokens in trajectory.versions:
            row[first : first + tokens] = version
            first += tokens
    return torch.from_numpy(versions)


def _positions(
    trajectories: Sequence[Trajectory], before: int, after: int, default_positions: torch.Tensor
) -> torch.Tensor:
    """The positions of trajectories, [B, k, P + T], or `default_positions` if they have none."""
    own_positions = [
        (trajectory.positions, before - len(trajectory.prompt_ids))
        for trajectory in trajectories
        if trajectory.positions is not None
    ]
    if not own_positions:
        return default_positions
    if len(own_positions) < len(trajectories):
        raise RolloutError("some trajectories of a batch have positions and others have none; give all or none")
    rows = []
    for positions, start in own_positions:
        missing = before + after - start - positions.shape[1]
        # Padding on the right counts on, so that the positions of a row do not depend on its length.
        rows.append(torch.cat([positions, positions[:, -1:] + 1 + torch.arange(missing)], dim=1))
        rows[-1] = torch.nn.functional.pad(rows[-1], (start, 0))
    return torch.stack(rows)


def _image_mask(trajectories: Sequence[Trajectory], real: torch.Tensor) -> torch.Tensor:
    """`image_mask` of `batch_of`; `real` [B, P + T] is false on padding."""
    image_mask = torch.zeros_like(real)
    for row, trajectory in enumerate(trajectories):
        if trajectory.image_mask is None:
            raise RolloutError(
                f"{trajectory.name} has no image_mask, and others of the batch have it; give all or none"
            )
        image_mask[row, real[row]] = trajectory.image_mask
    return image_mask


def _turns(trajectories: Sequence[Trajectory], width: int) -> dict[str, torch.Tensor]:
    """`turn_level_rewards` and `turn_states` of `batch_of`."""
    rewards = torch.zeros((len(trajectories), width), dtype=torch.float32)
    states = torch.zeros((len(trajectories), width), dtype=torch.int32)
    for row, trajectory in enumerate(trajectories):
        for place, reward in zip(trajectory.turn_ends or (), trajectory.turn_rewards, strict=False):
            rewards[row, place] += reward
        for place, state in trajectory.turn_states:
            states[row, place] = state
    return {TURN_LEVEL_REWARDS: rewards, TURN_STATES: states}


def _width(field: str, setting: str, width: int | None, trajectories: Sequence[Trajectory]) -> int:
    if not trajectories and width is not None:
        return width
    longest = max(trajectories, key=lambda trajectory: len(getattr(trajectory, field)))
    length = len(getattr(longest, field))
    if width is not None and length > width:
        raise RolloutError(f"{longest.name}: {field} has {length} entries, which do not fit into {setting}={width}")
    return length if width is None else width


def _experts(trajectories: Sequence[Trajectory], real: torch.Tensor) -> torch.Tensor:
    """`routed_experts` of `batch_of`; `real` [B, P + T] is false on padding."""
    for trajectory in trajectories:
        if trajectory.routed_experts is None:
            raise RolloutError(
                f"{trajectory.name} has no routed_experts, and others of the batch have them; give all or none"
            )
    experts_of_rows = [
        trajectory.routed_experts for trajectory in trajectories if trajectory.routed_experts is not None
    ]
    experts = experts_of_rows[0].new_zeros(*real.shape, *experts_of_rows[0].shape[1:])
    experts[real] = torch.cat(experts_of_rows)
    return experts


def columns_of(trajectories: Sequence[Trajectory], own: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Return the non-tensors of `batch_of`; `own` has the names of its tensors."""
    columns: dict[str, list[Any]] = {
        "uid": [trajectory.uid for trajectory in trajectories],
        "sample": [trajectory.sample for trajectory in trajectories],
    }
    if any(trajectory.session for trajectory in trajectories):
        # The estimators join rows of one session; a sample without a session is one by itself.
        columns["session_id"] = [trajectory.session or f"sample {trajectory.sample}" for trajectory in trajectories]
        columns["trajectory_index"] = [trajectory.turn for trajectory in trajectories]
    if any(trajectory.reward is not None for trajectory in trajectories):
        columns[TRAJECTORY_REWARD] = [trajectory.reward for trajectory in trajectories]
    if any(trajectory.turn_rewards or trajectory.turn_ends is not None for trajectory in trajectories):
        columns["turn_rewards"] = [list(trajectory.turn_rewards) for trajectory in trajectories]
    if any(trajectory.multimodal or trajectory.image_mask is not None for trajectory in trajectories):
        columns["multi_modal_inputs"] = [dict(trajectory.multimodal) for trajectory in trajectories]
    for trajectory in trajectories:
        for name in trajectory.extra:
            if name in own or bookkeeping.reserved([name], Writer.SESSION, Writer.ENGINE):
                raise RolloutError(
                    f"{trajectory.name}: extra field {name!r} has the name of a column of the batch; rename it"
                )
    for name in dict.fromkeys(name for trajectory in trajectories for name in trajectory.extra):
        columns[name] = [trajectory.extra.get(name) for trajectory in trajectories]
    return {name: object_array(values) for name, values in columns.items()}
