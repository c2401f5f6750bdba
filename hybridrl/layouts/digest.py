"""A digest of a part of a tensor: equal only if every element is the same and at the same place."""

from __future__ import annotations

from math import prod

import torch

from hybridrl.layouts.slices import TensorSlice

#: the integer of as many bytes as an element
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd, so that neighbouring places weigh differently in all bits
_CHUNK = 1 << 22  # elements at once; each takes three numbers of 8 bytes


def digest(values: torch.Tensor, tensor_slice: TensorSlice, shape: tuple[int, ...]) -> int:
    """Return the digest of the elements of a slice. Those of disjoint slices add up to that of both, modulo 2**64.

    Args:
        values: the elements, of the shape of the slice.
        tensor_slice: where they lie in the whole tensor.
        shape: of the whole tensor.
    """
    rows = max(1, _CHUNK // max(1, values[0].numel())) if values.ndim else 1
    total = 0
    for first in range(0, values.shape[0], rows):
        part = values[first : first + rows]
        bits = part.contiguous().view(INTEGERS[values.dtype.itemsize]).to(torch.int64)
        places = torch.zeros((), dtype=torch.int64, device=values.device)
        for dim, size in enumerate(part.shape):
            begin = tensor_slice.start[dim] + (first if dim == 0 else 0)
            index = torch.arange(begin, begin + size, device=values.device) * prod(shape[dim + 1 :])
            places = places.unsqueeze(-1) + index
        weights = (places + 1) * _FACTOR
        weights = (weights ^ (weights >> 29)) * _FACTOR  # without this, rows of equal sums could be exchanged
        total += int(((bits + 1) * weights).sum())
    return total % 2**64
