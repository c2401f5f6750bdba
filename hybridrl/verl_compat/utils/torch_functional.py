"""`verl.utils.torch_functional`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridrl.algorithms import (
    entropy_from_logits,
    logprobs_from_logits,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
)
from hybridrl.errors import DataError

__all__ = [
    "clip_by_value",
    "entropy_from_logits",
    "get_response_mask",
    "logprobs_from_logits",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "pad_2d_list_to_length",
    "pad_sequence_to_length",
    "postprocess_data",
]


def clip_by_value(x: torch.Tensor, tensor_min: torch.Tensor, tensor_max: torch.Tensor) -> torch.Tensor:
    """Return `x` limited entry by entry."""
    return torch.clamp(x, tensor_min, tensor_max)


def get_response_mask(
    response_id: torch.Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Return 1 for each token up to and including the first EOS token, and 0 after it. [B, T] -> [B, T]"""
    ends = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device)).long()
    return (ends.cumsum(dim=-1) - ends == 0).to(dtype)


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> torch.Tensor:
    """Return ragged rows as one tensor, padded at the right to the longest row, or to `max_length` if that is more."""
    width = max([max_length or 0, *map(len, response)])
    return torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in response])


def pad_sequence_to_length(
    tensors: torch.Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> torch.Tensor:
    """Return tensors whose last dimension has at least `max_seq_len` entries."""
    missing = max(0, max_seq_len - tensors.shape[-1])
    return torch.nn.functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def postprocess_data(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask `[B, S]` with exactly `max_length` columns.

    Args:
        truncation: what happens to longer rows: `error`, `left`, `right` (the side that is cut), or `middle`.

    Raises:
        DataError: rows are longer with truncation=error, or `truncation` is unknown.
    """
    length = input_ids.shape[-1]
    if length <= max_length:
        return (
            pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
            pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
        )
    if truncation not in ("left", "right", "middle"):
        raise DataError(
            f"truncation={truncation}: {length} tokens are more than max_length={max_length}; cut them with left, "
            "right or middle"
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    columns = torch.cat([torch.arange(head), torch.arange(length - (max_length - head), length)])
    return input_ids[..., columns], attention_mask[..., columns]
