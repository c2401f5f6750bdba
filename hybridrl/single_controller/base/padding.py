"""Splits a batch over data-parallel ranks, even if its rows do not divide evenly.

An uneven batch is padded at its end with copies of its own rows, to the next multiple of the number of shards. A copy
must never be counted, so a padded batch marks which rows are copies:

* `batch["is_padding"]` ([B] bool) exists if and only if rows were added, and is true on those rows. It moves with
  its row through slicing, selecting and micro-batching. A batch without tensors carries it in `non_tensor_batch`.
* `response_mask` and `loss_mask`, if present, are zero on added rows, so every sum over tokens that uses its mask
  is correct without further care. `attention_mask` does not change, because a model needs rows with at least one
  token.

Methods that count rows use `real_rows`. After the call, the added rows are removed from an output that has a row for
each input row (or a fixed number of rows for each). An output without rows, such as metrics, does not change.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from hybridrl.protocol import DataProto, pad_dataproto_to_divisor

IS_PADDING = "is_padding"
_MASKS = ("response_mask", "loss_mask")


class Padding(NamedTuple):
    """Padding of a batch: `rows` after padding, of which the last `added` are copies."""

    rows: int
    added: int


def pad_to_divisor(data: DataProto, divisor: int) -> tuple[DataProto, Padding | None]:
    """Append marked copies to `data` so that `divisor` divides its rows. Returns `data` itself if it already does.

    Raises:
        ValueError: the batch has no rows.
    """
    rows = len(data)
    if rows == 0:
        raise ValueError(f"a batch without rows cannot be split over {divisor} ranks")
    if rows % divisor == 0:
        return data, None
    padded, added = pad_dataproto_to_divisor(data, divisor)
    padding = Padding(rows + added, added)
    # pad_dataproto_to_divisor built new containers, so only entries that change are replaced
    flags = torch.zeros(padding.rows, dtype=torch.bool)
    flags[rows:] = True
    if padded.batch is None:
        padded.non_tensor_batch[IS_PADDING] = flags.numpy().astype(object)
        return padded, padding
    padded.batch[IS_PADDING] = flags
    for name in _MASKS:
        mask = padded.batch.get(name, None)
        if mask is not None:
            mask = mask.clone()
            mask[rows:] = 0
            padded.batch[name] = mask
    return padded, padding


def padding_mask(data: DataProto) -> torch.Tensor | None:
    """Return [B] bool, true on rows that were added; None if no row was added."""
    if data.batch is not None and data.batch.get(IS_PADDING, None) is not None:
        return data.batch[IS_PADDING]
    if IS_PADDING in data.non_tensor_batch:
        return torch.from_numpy(np.asarray(data.non_tensor_batch[IS_PADDING], dtype=bool))
    return None


def real_rows(data: DataProto) -> int:
    """Return the number of rows of `data` that are not padding."""
    mask = padding_mask(data)
    return len(data) if mask is None else int((~mask).sum())


def drop_marker(data: DataProto) -> DataProto:
    """Remove the padding marker from a batch that echoes its input."""
    if data.batch is not None and data.batch.get(IS_PADDING, None) is not None:
        data.batch = data.batch.exclude(IS_PADDING)
    data.non_tensor_batch.pop(IS_PADDING, None)
    return data


def unpad_output(output: Any, padding: Padding) -> Any:
    """Remove the padding rows from a collected output.

    Raises:
        ValueError: the output has no marker and its number of rows is not a multiple of the input's, so the copies
            cannot be found.
    """
    if not isinstance(output, DataProto) or len(output) == 0:
        return output
    mask = padding_mask(output)
    if mask is not None:
        return drop_marker(output.select_idxs(torch.nonzero(~mask).flatten()))
    per_row, rest = divmod(len(output), padding.rows)
    if rest:
        raise ValueError(
            f"the batch of {padding.rows - padding.added} rows was filled up to {padding.rows} so that the ranks get "
            f"equal shards, and the method returned {len(output)} rows, which is no multiple of that: the added rows "
            f"cannot be told apart. Return one row for each input row, or keep the field {IS_PADDING!r} of the input "
            "in the output"
        )
    return output.slice(0, len(output) - padding.added * per_row)


class CollectUnpadded:
    """Collects shards and then removes the padding. It is picklable, so that a future can be sent to a worker."""

    def __init__(self, collect_fn: Any, padding: Padding) -> None:
        self.collect_fn = collect_fn
        self.padding = padding

    def __call__(self, shards: list[Any]) -> Any:
        return unpad_output(self.collect_fn(shards), self.padding)
