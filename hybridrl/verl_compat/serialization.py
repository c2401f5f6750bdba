"""Tensors as bytes, as verl's `protocol` offers them for code that sends batches over sockets; not called here."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from hybridrl.protocol.rows import fields_of

#: dtype, shape and bytes of a tensor
Plain = tuple[str, tuple[int, ...], memoryview]
#: layout of a nested tensor, and its rows
Nested = tuple[str, list[Plain]]


def serialize_single_tensor(obj: torch.Tensor) -> Plain:
    """Return a tensor's dtype, shape and bytes; the bytes of a contiguous CPU tensor are not copied."""
    data = obj.detach().cpu().contiguous()
    raw = data.reshape(-1).view(torch.uint8) if data.numel() else torch.empty(0, dtype=torch.uint8)
    return str(data.dtype).removeprefix("torch."), tuple(data.shape), raw.numpy().data


def deserialize_single_tensor(arr: Plain) -> torch.Tensor:
    """Return the tensor that `serialize_single_tensor` was given, with memory of its own."""
    dtype, shape, data = arr
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).reshape(shape)


def serialize_tensordict(batch: TensorDict) -> tuple[tuple[int, ...], str | None, dict[str, tuple[str, Any]]]:
    """Return a TensorDict's batch size, its device, and `("tensor", Plain)` or `("nested", Nested)` for each field.

    Raises:
        TypeError: a field is no tensor.
    """
    fields: dict[str, tuple[str, Any]] = {}
    for key, value in fields_of(batch).items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"field '{key}' is a {type(value).__name__}; only tensors can be serialized")
        if value.is_nested:
            rows = [serialize_single_tensor(row) for row in value.unbind()]
            fields[key] = "nested", (str(value.layout).removeprefix("torch."), rows)
        else:
            fields[key] = "tensor", serialize_single_tensor(value)
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), fields


def deserialize_tensordict(arr: tuple[tuple[int, ...], str | None, dict[str, tuple[str, Any]]]) -> TensorDict:
    """Return the TensorDict that `serialize_tensordict` was given, on its device."""
    batch_size, device, encoded = arr
    fields: dict[str, torch.Tensor] = {}
    for key, (kind, value) in encoded.items():
        if kind == "nested":
            layout, rows = value
            tensors = [deserialize_single_tensor(row) for row in rows]
            fields[key] = torch.nested.as_nested_tensor(tensors, layout=getattr(torch, layout))
        else:
            fields[key] = deserialize_single_tensor(value)
    return TensorDict(fields, batch_size=batch_size, device=device)
