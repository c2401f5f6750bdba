"""Equality of values, and how two batches become one: union of fields and merging of meta_info."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from hybridrl.errors import BatchError
from hybridrl.protocol.rows import fields_of, jagged_parts

METRICS = "metrics"


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal, entry by entry.

    NaN equals NaN, types and dtypes must agree, and identical objects are equal.
    """
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _same_tensor(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and same_array(a, b)
    if isinstance(a, TensorDictBase) or isinstance(b, TensorDictBase):
        if not isinstance(a, TensorDictBase) or not isinstance(b, TensorDictBase) or a.batch_size != b.batch_size:
            return False
        return same(fields_of(a), fields_of(b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return True
    return bool(a == b)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.is_nested != b.is_nested or a.layout != b.layout:
        return False
    if a.is_nested:
        if a.layout is torch.jagged:
            (values_a, offsets_a, dim_a), (values_b, offsets_b, dim_b) = jagged_parts(a), jagged_parts(b)
            return dim_a == dim_b and _same_tensor(offsets_a, offsets_b) and _same_tensor(values_a, values_b)
        rows_a, rows_b = a.unbind(), b.unbind()
        return len(rows_a) == len(rows_b) and all(map(_same_tensor, rows_a, rows_b))
    if a.shape != b.shape:
        return False
    b = b.to(a.device)
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def same_array(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays have the same shape and the same entries (NaN equals NaN)."""
    if a is b:
        return True
    if a.shape != b.shape:
        return False
    if a.dtype == object or b.dtype == object:
        return all(map(same, a.ravel().tolist(), b.ravel().tolist()))
    if a.dtype.kind in "fc" and b.dtype.kind in "fc":
        return bool(np.array_equal(a, b, equal_nan=True))
    return bool(np.array_equal(a, b))


def differing_keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the keys that occur in both with different values."""
    return [key for key in second if key in first and not same(first[key], second[key])]


def refuse_differing(part: str, keys: list[str]) -> None:
    """Raise ValueError when `keys` (what `differing_keys` found in the named part) is not empty."""
    if keys:
        names = ", ".join(f"'{key}'" for key in keys)
        raise BatchError(
            f"union: both sides have {names} in {part} with different values; "
            "pop or rename the key on one side, or give both the same value"
        )


def check_tensor_union(first: TensorDictBase, second: TensorDictBase) -> None:
    """Raise ValueError when the two have different batch sizes or different values under one key."""
    if first.batch_size != second.batch_size:
        raise BatchError(
            f"union: batches of {tuple(first.batch_size)} and {tuple(second.batch_size)} rows cannot be joined by field"
        )
    refuse_differing("batch", differing_keys(fields_of(first), fields_of(second)))


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the fields of the second to the first, in place, and return the first.

    Raises:
        ValueError: the batch sizes differ, or a key of both has different values.
    """
    check_tensor_union(tensor_dict1, tensor_dict2)
    present = fields_of(tensor_dict1)
    for key, value in fields_of(tensor_dict2).items():
        if key not in present:
            tensor_dict1.set(key, value)
    return tensor_dict1


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the arrays of the second to the first, in place, and return the first.

    Raises:
        ValueError: a key of both has different arrays.
    """
    refuse_differing("non_tensor_batch", differing_keys(tensor_dict1, tensor_dict2))
    for key, value in tensor_dict2.items():
        tensor_dict1.setdefault(key, value)
    return tensor_dict1


def merge_meta_info(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the meta_info of the parts of one batch.

    `metrics` (per part a dict or a list of dicts) becomes one dict of lists, in the order of the parts. A value that is
    already a list is appended entry by entry. Every other key must have the same value in all parts that have it.

    Raises:
        ValueError: the values of a key conflict; the message names the key.
    """
    merged: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for position, part in enumerate(parts):
        for key, value in part.items():
            if key == METRICS:
                _add_metrics(metrics, value)
            elif key not in merged:
                merged[key] = value
            elif not same(merged[key], value):
                raise BatchError(
                    f"Conflicting values for meta_info key '{key}': {merged[key]!r} before part {position}, "
                    f"{value!r} in it; drop the key from the parts or put what differs under meta_info['{METRICS}']"
                )
    if metrics:
        merged[METRICS] = metrics
    return merged


def _add_metrics(total: dict[str, list[Any]], value: Any) -> None:
    for metrics in value if isinstance(value, (list, tuple)) else [value]:
        if metrics is None:
            continue
        if not isinstance(metrics, Mapping):
            raise ValueError(
                f"concat: meta_info['{METRICS}'] must be a dict or a list of dicts, found {type(metrics).__name__}"
            )
        for name, entry in metrics.items():
            total.setdefault(name, []).extend(entry if isinstance(entry, (list, tuple)) else [entry])


def check_same_keys(keys: list[set[str]], part: str) -> None:
    """Refuse batches that are joined by rows and have other fields.

    Args:
        keys: of each batch.
        part: the part of a batch that has them, for the message.

    Raises:
        ValueError: names what each lacks.
    """
    for position, other in enumerate(keys[1:], start=1):
        if other != keys[0]:
            raise ValueError(
                f"concat: {part} differs between the parts: part 0 has {sorted(keys[0] - other)} that part {position} "
                f"lacks, part {position} has {sorted(other - keys[0])} that part 0 lacks"
            )
