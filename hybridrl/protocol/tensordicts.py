"""Conversions: plain dicts to a TensorDict, all three parts to and from one TensorDict, fields to text."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from hybridrl.errors import BatchError
from hybridrl.protocol.rows import fields_of, object_array


def tensordict_of(tensors: Mapping[str, Any], num_batch_dims: int) -> TensorDict:
    """Make a TensorDict whose batch size is the first `num_batch_dims` dimensions that all tensors share.

    Raises:
        TypeError: a value is not a tensor.
        ValueError: a tensor has too few dimensions or a different batch size; the message names it.
    """
    batch_size: tuple[Any, ...] = ()
    first = ""
    for key, value in tensors.items():
        if not isinstance(value, (torch.Tensor, TensorDictBase)):
            raise TypeError(f"field '{key}' must be a tensor, found {type(value).__name__}; lists go to non_tensors")
        if value.ndim < num_batch_dims:
            raise BatchError(f"field '{key}' has {value.ndim} dimensions, fewer than num_batch_dims={num_batch_dims}")
        # Not value.shape: a nested tensor of strided layout has none.
        size = tuple(value.size(dim) for dim in range(num_batch_dims))
        if not first:
            batch_size, first = size, key
        elif size != batch_size:
            raise BatchError(f"field '{key}' has batch size {size}, but field '{first}' has {batch_size}")
    return TensorDict(dict(tensors), batch_size=batch_size)


def split_tensordict(whole: TensorDict) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]:
    """Return the tensors, the stacks of non-tensor data as object arrays, and the single non-tensor values."""
    tensors, arrays, single = {}, {}, {}
    for key, value in fields_of(whole).items():
        if isinstance(value, NonTensorData):
            single[key] = value.data
        elif isinstance(value, NonTensorStack):
            arrays[key] = object_array(value.tolist())
        else:
            tensors[key] = value
    return tensors, arrays, single


def joined_tensordict(
    batch: TensorDict | None, arrays: Mapping[str, np.ndarray], single: Mapping[str, Any], rows: int
) -> TensorDict:
    """Return one TensorDict of all three; the inverse of `split_tensordict`.

    Raises:
        ValueError: a name occurs in more than one of them.
    """
    fields = fields_of(batch)
    names = [*fields, *arrays, *single]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"to_tensordict: {twice} stand in more than one of batch, non_tensor_batch and meta_info")
    result = TensorDict(
        fields,
        batch_size=[rows] if batch is None else batch.batch_size,
        device=None if batch is None else batch.device,
    )
    for key, array in arrays.items():
        entries: Any = [NonTensorData(value) for value in array]
        result.set(key, NonTensorStack(*entries))
    for key, value in single.items():
        data: Any = NonTensorData(value, batch_size=result.batch_size)
        result.set(key, data)
    return result


def describe(value: Any) -> str:
    """Return a short description of a field: its type, dtype and shape."""
    if isinstance(value, torch.Tensor):
        # A ragged dimension prints as its symbol, such as j1; a nested tensor of another layout has no shape at all.
        sizes = "nested" if value.is_nested and value.layout is torch.strided else ", ".join(map(str, value.shape))
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')} [{sizes}] {value.device}"
    if isinstance(value, np.ndarray):
        entry = f" of {type(value.flat[0]).__name__}" if value.dtype == object and value.size else ""
        return f"ndarray {value.dtype} {list(value.shape)}{entry}"
    return type(value).__name__
