"""Selecting and joining rows of tensors (plain, jagged, nested TensorDicts) and of NumPy arrays.

Legend: B rows of the batch, N rows chosen. A jagged tensor keeps its rows end to end in `values`, row b between
`offsets[b]` and `offsets[b + 1]`. Torch combines two jagged tensors only when they share one `offsets` object, so the
functions here take a `memo` (old offsets -> new offsets) that keeps the sharing over a whole batch.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

# Results of at least this size are allocated in huge pages.
LARGE_BYTES = 1 << 22

# Maps the id of the old offsets to the new and the old ones: an id is valid only while its object lives.
Memo = dict[Any, Any]


def object_array(values: Iterable[Any]) -> np.ndarray:
    """Make a one-dimensional array of dtype object with one entry per value, whatever the values are.

    `np.array(values, dtype=object)` would turn lists that happen to have equal lengths into a matrix.
    """
    items = values if isinstance(values, (list, tuple)) else list(values)
    return np.fromiter(items, dtype=object, count=len(items))


def as_array(values: Any) -> np.ndarray:
    """Return a NumPy array as it is and anything else as a one-dimensional object array."""
    return values if isinstance(values, np.ndarray) else object_array(values)


def as_matrix(values: Any) -> Any:
    """Return an array of lists with equal lengths as an array `[B, C]`, and anything else as it is."""
    if not isinstance(values, np.ndarray) or values.dtype != object or values.ndim != 1:
        return values
    if not len(values) or any(not isinstance(row, (list, tuple)) or len(row) != len(values[0]) for row in values):
        return values
    return object_array([entry for row in values for entry in row]).reshape(len(values), len(values[0]))


def fields_of(batch: TensorDictBase | None) -> dict[str, Any]:
    """Return the fields of a TensorDict by name, as they are stored; an empty dict for None."""
    return {} if batch is None else {str(key): batch.get(key) for key in batch.keys()}


def row_indices(idxs: Any, length: int) -> np.ndarray:
    """Turn a list, array or tensor of row numbers (negative ones count from the end) or a mask into int64 `[N]`.

    Raises:
        IndexError: a number is outside the batch, a mask has the wrong length, or an entry is not a row number.
    """
    array = idxs.detach().cpu().numpy() if isinstance(idxs, torch.Tensor) else np.asarray(idxs)
    if array.ndim != 1:
        raise IndexError(f"rows are chosen by a one-dimensional list, array or mask, found shape {array.shape}")
    if array.dtype == np.bool_:
        if len(array) != length:
            raise IndexError(f"the mask has {len(array)} entries but the batch has {length} rows")
        return np.flatnonzero(array)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise IndexError(f"rows are chosen by integers or booleans, found {array.dtype}")
    array = array.astype(np.int64, copy=False)
    low, high = int(array.min()), int(array.max())
    if low < -length or high >= length:
        raise IndexError(f"row {low if low < -length else high} is outside a batch of {length} rows")
    return np.where(array < 0, array + length, array) if low < 0 else array


def jagged_dim(tensor: torch.Tensor) -> int:
    """Return the ragged dimension of a jagged tensor (1 or more)."""
    return next(dim for dim, size in enumerate(tensor.shape) if not isinstance(size, int))


def jagged_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return `(values, offsets [B + 1], ragged dimension)` of a jagged tensor, without holes between its rows."""
    nested: Any = tensor  # torch does not declare the methods of jagged tensors
    if nested.lengths() is not None:
        nested = nested.contiguous()
    return nested.values(), nested.offsets(), jagged_dim(nested)


def _from_jagged(values: torch.Tensor, offsets: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=dim)


def _renest(tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor(tensors, dtype=like.dtype, device=like.device)


def slice_tensor(tensor: Any, start: int, stop: int, memo: Memo) -> Any:
    """Return rows `start` to `stop` (0 <= start <= stop <= B) as a view."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_nested:
        return tensor[start:stop]
    if tensor.layout is not torch.jagged:
        return _renest(list(tensor.unbind())[start:stop], tensor)
    values, offsets, dim = jagged_parts(tensor)
    first, last = int(offsets[start]), int(offsets[stop])
    if id(offsets) not in memo:
        memo[id(offsets)] = offsets[start : stop + 1] - first, offsets
    return _from_jagged(values.narrow(dim - 1, first, last - first), memo[id(offsets)][0], dim)


def index_tensor(tensor: Any, idxs: torch.Tensor, memo: Memo) -> Any:
    """Return the rows `idxs` (int64 `[N]`, none negative) as a copy."""
    if not isinstance(tensor, torch.Tensor):
        return tensor[idxs]
    if not tensor.is_nested:
        target = _large_empty((len(idxs), *tensor.shape[1:]), [tensor])
        return torch.index_select(tensor, 0, idxs.to(tensor.device), out=target)
    if tensor.layout is not torch.jagged:
        rows = tensor.unbind()
        return _renest([rows[i] for i in idxs.tolist()], tensor)
    values, offsets, dim = jagged_parts(tensor)
    if id(offsets) not in memo:
        idxs = idxs.to(offsets.device)
        lengths = offsets.diff()[idxs]
        new_offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(offsets.dtype)
        # Entry j of the new row n is at offsets[idxs[n]] + (j - new_offsets[n]) in the old values.
        shift = torch.repeat_interleave(offsets[idxs] - new_offsets[:-1], lengths)
        memo[id(offsets)] = new_offsets, torch.arange(int(new_offsets[-1]), device=offsets.device) + shift, offsets
    new_offsets, where, _ = memo[id(offsets)]
    return _from_jagged(values.index_select(dim - 1, where), new_offsets, dim)


def cat_fields(key: str, tensors: Sequence[Any], memo: Memo) -> Any:
    """Join the tensors of field `key` along the rows into new memory.

    Raises:
        ValueError: the tensors do not fit together (see `check_alike`); the message names the field.
    """
    check_alike(key, tensors)
    first = tensors[0]
    if not isinstance(first, torch.Tensor):
        return torch.cat(list(tensors), dim=0)
    if not first.is_nested:
        return _cat_plain(tensors)
    if first.layout is not torch.jagged:
        return _renest([row for tensor in tensors for row in tensor.unbind()], first)
    parts = [jagged_parts(tensor) for tensor in tensors]
    dim = parts[0][2]
    origin = tuple(id(offsets) for _, offsets, _ in parts)
    if origin not in memo:
        lengths = torch.cat([offsets.diff() for _, offsets, _ in parts])
        memo[origin] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(parts[0][1].dtype), parts
    return _from_jagged(torch.cat([values for values, _, _ in parts], dim=dim - 1), memo[origin][0], dim)


def _cat_plain(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    first = tensors[0]
    target = _large_empty((sum(map(len, tensors)), *first.shape[1:]), tensors)
    return torch.cat(list(tensors), dim=0) if target is None else torch.cat(list(tensors), dim=0, out=target)


def _large_empty(shape: tuple[int, ...], sources: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return new CPU memory for a large result made from `sources`; None where torch's own allocation is sufficient.

    NumPy asks the kernel for huge pages and torch does not: joining 256 MB takes a quarter of the time or less.
    """
    dtype = sources[0].dtype
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE_BYTES or any(s.device.type != "cpu" or s.requires_grad for s in sources):
        return None
    return torch.from_numpy(np.empty(size, dtype=np.uint8)).view(dtype).view(shape)


def check_alike(key: str, tensors: Sequence[Any]) -> None:
    """Refuse to join tensors that torch would promote or could not join.

    Raises:
        ValueError: dtypes, layouts or shapes differ; the message names the field and the differences.
    """
    first = tensors[0]
    for position, other in enumerate(tensors[1:], start=1):
        if isinstance(first, TensorDictBase) or isinstance(other, TensorDictBase):
            if type(first) is not type(other):
                raise ValueError(f"concat: field '{key}' is a TensorDict in some parts and a tensor in others")
            continue
        if not isinstance(first, torch.Tensor) or not isinstance(other, torch.Tensor):
            continue
        if first.dtype != other.dtype:
            raise ValueError(
                f"concat: field '{key}' has dtype {first.dtype} in part 0 and {other.dtype} in part {position}; "
                "convert it in the method that made it"
            )
        if first.is_nested != other.is_nested or first.layout != other.layout:
            raise ValueError(f"concat: field '{key}' is nested in part {0 if first.is_nested else position} only")
        if not first.is_nested and first.shape[1:] != other.shape[1:]:
            raise ValueError(
                f"concat: field '{key}' has shape {tuple(first.shape)} in part 0 and {tuple(other.shape)} in part "
                f"{position}; pad it to one width before joining"
            )


def cat_arrays(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Join arrays along the rows; entries keep their type.

    Numbers are promoted as NumPy does, strings stay strings, and anything else becomes dtype object. Arrays of objects
    whose rows differ in shape (such as one made of lists that happened to have equal lengths) become one-dimensional,
    each row a list.
    """
    if len({array.shape[1:] for array in arrays}) > 1:
        return object_array([row.tolist() if isinstance(row, np.ndarray) else row for array in arrays for row in array])
    kinds = {"i" if array.dtype.kind in "biufc" else array.dtype.kind for array in arrays}
    if len(kinds) > 1:
        arrays = [array.astype(object) for array in arrays]
    return np.concatenate(list(arrays), axis=0)
