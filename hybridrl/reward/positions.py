"""Where responses of a batch end."""

import torch
from tensordict import TensorDict

from hybridrl.errors import RewardError
from hybridrl.protocol import DataProto


def tensors_of(batch: DataProto) -> TensorDict:
    """The batch's tensors.

    Raises:
        RewardError: there are no responses among them.
    """
    if batch.batch is None or batch.batch.get("responses", None) is None:
        raise RewardError("the batch to score has no tensor 'responses': score generated batches.")
    return batch.batch


def response_lengths(batch: DataProto) -> torch.Tensor:
    """Tokens of each response up to its end, int64 `[B]`."""
    tensors = tensors_of(batch)
    width = tensors["responses"].shape[-1]
    mask = tensors.get("attention_mask", None)
    if mask is None:
        return _last_of(tensors["response_mask"]) + 1  # it may have holes, so that its sum is not the length
    return mask[:, mask.shape[-1] - width :].sum(dim=-1)


def last_generated(batch: DataProto) -> torch.Tensor:
    """The position of each response's last generated token, int64 `[B]`; 0 for an empty response.

    Tokens of tools are masked in training, so that a reward there would be lost.
    """
    mask = tensors_of(batch).get("response_mask", None)
    last = response_lengths(batch) - 1 if mask is None else _last_of(mask)
    return last.clamp(min=0)


def _last_of(mask: torch.Tensor) -> torch.Tensor:
    """The last position `[B]` where a mask `[B, T]` is set; -1 where it is nowhere."""
    positions = torch.arange(mask.shape[-1], device=mask.device)
    return torch.where(mask.bool(), positions, -1).amax(dim=-1)
