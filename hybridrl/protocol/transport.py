"""Pickling of batches without copies.

Ray pickles with protocol 5 and sends large buffers out of band: it copies them once into shared memory, where the
receiver reads them. It does so for NumPy arrays but not for torch tensors. This module therefore pickles a tensor as
the NumPy view of its own rows, so a shard that is a slice of a larger tensor along the first dimension needs no extra
copy.

The padding of a large batch does not travel, nor what follows from other fields (`compact`); such fields arrive in
memory of their own.

Rules:
 - tensors arrive as CPU tensors without gradient: a CUDA tensor is moved to the CPU first, and the receiver moves it
   to its device with `DataProto.to`;
 - dtypes that NumPy lacks (bfloat16, float8) travel as integers of the same width;
 - non-contiguous tensors are made contiguous first;
 - buffers that arrive out of band are read-only shared memory: never write into them in place.

A batch has its own pickler (`_Pickler`), so that tensors are treated alike wherever they occur: in `batch`, inside the
entries of an object array, in `meta_info`. Objects that this pickler does not know (user classes, object references,
actor handles) are left to the outer pickler, which is Ray's.
"""

import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from hybridrl.protocol import compact
from hybridrl.protocol.rows import fields_of, jagged_dim

# Smaller buffers are copied into the stream: that costs less than Ray's bookkeeping for a separate buffer.
IN_BAND_BYTES = 4096

_KNOWN_PACKAGES = frozenset({"builtins", "numpy", "torch", "tensordict", "hybridrl", "_operator", "collections"})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_NUMPY_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32}
    | {torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)


class _Writable:
    """Presents a read-only array to NumPy as a writable one over the same memory, and keeps that memory alive."""

    __slots__ = ("__array_interface__", "array")

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}


def tensor_from_numpy(array: np.ndarray) -> torch.Tensor:
    """Return a tensor over the array's memory. Plain `torch.from_numpy` warns about every read-only array."""
    if not array.flags.writeable:
        array = np.asarray(_Writable(array)) if array.size else np.empty(array.shape, array.dtype)
    return torch.from_numpy(array)


def tensor_to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's values as a NumPy array, without a copy where it is a contiguous CPU tensor.

    A dtype that NumPy lacks becomes the integer dtype of the same width.
    """
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype not in _NUMPY_DTYPES:
        tensor = tensor.view(_INTEGERS[tensor.element_size()])
    return tensor.numpy()


def _load_tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    tensor = tensor_from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _load_jagged(values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None, dim: int) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, lengths=lengths, jagged_dim=dim)


def _load_nested(rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, dtype=dtype)


def _load_tensordict(fields: dict[str, Any], batch_size: tuple[int, ...], on_device: bool) -> TensorDict:
    return TensorDict(fields, batch_size=batch_size, device="cpu" if on_device else None)


def _load_objects(values: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    array = np.fromiter(values, dtype=object, count=len(values))
    return array if len(shape) == 1 else array.reshape(shape)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.is_nested:
        if tensor.layout is torch.jagged:
            nested: Any = tensor  # torch does not declare the methods of jagged tensors
            return _load_jagged, (nested.values().detach(), nested.offsets(), nested.lengths(), jagged_dim(nested))
        return _load_nested, ([row.detach() for row in tensor.unbind()], tensor.dtype)
    if type(tensor).__module__.startswith("torch.distributed"):
        raise TypeError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} lives on several ranks and cannot travel; "
            "call its full_tensor() or to_local() first"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return NotImplemented
    return _load_tensor, (tensor_to_numpy(tensor), tensor.dtype)


def _foreign(position: int) -> Any:
    """Placeholder in the stream for an object that the outer pickler carries; it is replaced on reading."""
    raise pickle.UnpicklingError(f"object {position} of a batch was read without the objects that were sent with it")


class _Pickler(pickle.Pickler):
    """Writes tensors as NumPy views and sets objects of unknown types aside for the outer pickler."""

    def __init__(self, stream: io.BytesIO, callback: Callable[[pickle.PickleBuffer], bool] | None) -> None:
        super().__init__(stream, protocol=5, buffer_callback=callback)
        self.foreign: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return _reduce_tensor(obj)
        kind = type(obj)
        if kind is np.ndarray:
            return (_load_objects, (obj.ravel().tolist(), obj.shape)) if obj.dtype == object else NotImplemented
        if kind is TensorDict:
            packed = compact.pack(obj)
            if packed is not None:
                return packed.__reduce__()
            return _load_tensordict, (fields_of(obj), tuple(obj.batch_size), obj.device is not None)
        by_name = isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType))
        module = (obj if by_name else kind).__module__ or ""
        if module.partition(".")[0] in _KNOWN_PACKAGES and not (by_name and "<" in obj.__qualname__):
            return NotImplemented
        self.foreign.append(obj)
        return _foreign, (len(self.foreign) - 1,)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: Any, buffers: list[Any], foreign: list[Any]) -> None:
        super().__init__(stream, buffers=buffers)
        self.foreign = foreign

    def find_class(self, module: str, name: str) -> Any:
        if name == "_foreign" and module == __name__:
            return self.foreign.__getitem__
        return super().find_class(module, name)


def dumps(state: Any, protocol: int) -> tuple[Any, list[Any], list[Any]]:
    """Pickle `state`.

    Returns:
        `(stream, buffers, foreign)`, which the outer pickler has to carry. With protocol 5 the stream and the large
        buffers are PickleBuffers, which it may send out of band; with an older protocol everything is in the stream.
    """
    buffers: list[pickle.PickleBuffer] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes <= IN_BAND_BYTES:
            return True
        buffers.append(buffer)
        return False

    stream = io.BytesIO()
    pickler = _Pickler(stream, keep if protocol >= 5 else None)
    pickler.dump(state)
    data = stream.getbuffer() if protocol >= 5 else stream.getvalue()
    return (pickle.PickleBuffer(data) if protocol >= 5 else data), buffers, pickler.foreign


def loads(stream: Any, buffers: list[Any], foreign: list[Any]) -> Any:
    """Read what `dumps` wrote."""
    return _Unpickler(io.BytesIO(stream), buffers, foreign).load()


def check_fields(batch: TensorDictBase | None) -> None:
    """Refuse fields that cannot travel, by name.

    Raises:
        TypeError: a field is spread over several ranks (DTensor).
    """
    for key, value in fields_of(batch).items():
        if isinstance(value, torch.Tensor) and type(value).__module__.startswith("torch.distributed"):
            raise TypeError(
                f"field '{key}' is a {type(value).__name__}: it lives on several ranks and cannot travel; "
                "call its full_tensor() or to_local() first"
            )
