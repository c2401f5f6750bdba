"""Arguments for several ranks: a large value is put into the object store once, however many ranks read it."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import ray
import torch

from hybridrl.protocol import DataProto, DataProtoFuture
from hybridrl.protocol.packed import PackedProto

# Up to this size an argument is sent inside the call itself, as Ray does by default. Measured on two workers, a put
# pays off from 200 KB on.
INLINE_BYTES = 100 * 1024
# A container with more entries than this is put without being inspected.
_MAX_ENTRIES = 64


def put_shared(column: list[Any]) -> list[Any]:
    """Return the values of one argument, one per rank. A large value that several ranks share becomes a reference.

    A value that only one rank reads is unchanged, because Ray itself stores it once if it is large.
    """
    if len(column) < 2:
        return column
    positions: dict[int, list[int]] = {}
    for index, value in enumerate(column):
        positions.setdefault(id(value), []).append(index)
    if len(positions) == len(column):
        return column
    placed = column
    for indices in positions.values():
        value = column[indices[0]]
        if len(indices) > 1 and not is_small(value):
            if placed is column:
                placed = list(column)
            reference = ray.put(value)
            for index in indices:
                placed[index] = reference
    return placed


def is_small(value: Any) -> bool:
    """Return whether a value is known to take at most `INLINE_BYTES`. It is not for unknown kinds of objects."""
    return _bytes(value, 3) <= INLINE_BYTES


def _bytes(value: Any, depth: int) -> int:
    """Return a lower bound of the size of a value. Counting stops as soon as the value is clearly large."""
    if value is None or isinstance(
        value, bool | int | float | np.generic | enum.Enum | ray.ObjectRef | DataProtoFuture
    ):
        return 64
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.size * 64 if isinstance(value, np.ndarray) and value.dtype.hasobject else int(value.nbytes)
    if isinstance(value, DataProto):
        tensors = value.packed_bytes if isinstance(value, PackedProto) else None
        if tensors is None:
            tensors = 0 if value.batch is None else sum(_bytes(tensor, 0) for tensor in value.batch.values())
        return (
            tensors
            + sum(_bytes(array, 0) for array in value.non_tensor_batch.values())
            + _bytes(value.meta_info, depth)
        )
    if isinstance(value, dict | list | tuple | set):
        if len(value) > _MAX_ENTRIES:
            return INLINE_BYTES + 1
        if depth == 0:
            return len(value) * 64
        entries = value.values() if isinstance(value, dict) else value
        return sum(_bytes(entry, depth - 1) for entry in entries)
    return INLINE_BYTES + 1
