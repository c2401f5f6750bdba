"""The slice of a module's tensor that each checkpoint tensor is, where the module stores several in one.

The conversion to the form of checkpoints is run once with tensors that have a shape and no memory. What it splits,
squeezes or copies stays traceable to the elements that it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.errors import ModelError
from hybridrl.layouts.slices import TensorSlice, whole

Named = Iterable[tuple[str, torch.Tensor]]


def _merged(sizes: Iterable[int], strides: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return sizes and strides without dimensions of size 1, and with dimensions joined that lie next to each other."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)


def _unravel(offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        offset, at = divmod(offset, size)
        index.insert(0, at)
    return tuple(index)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


def slice_of(view: torch.Tensor, shape: tuple[int, ...], base: int = 0) -> TensorSlice | None:
    """Return the slice of a contiguous tensor that a view of it covers in order, or None if it covers no slice so.

    Args:
        view: the view.
        shape: of the whole tensor.
        base: the whole tensor's offset in its storage.
    """
    sizes, strides = tuple(view.shape), view.stride()
    if 0 in sizes or any(stride < 0 for stride in strides):
        return None
    first = int(view.storage_offset()) - base
    start = _unravel(first, shape)
    last = _unravel(first + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)), shape)
    if any(a > b for a, b in zip(start, last, strict=True)):
        return None
    tensor_slice = TensorSlice(start, tuple(index + 1 for index in last))
    extents = tuple(b - a for a, b in zip(tensor_slice.start, tensor_slice.stop, strict=True))
    return tensor_slice if _merged(sizes, strides) == _merged(extents, _contiguous_strides(shape)) else None


class ModuleSlice(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        source: the module's tensor that holds it.
        slice: its elements there, in the same order.
        shape: of the tensor in the checkpoint; it may lack dimensions of size 1 that the slice has.
    """

    source: str
    slice: TensorSlice
    shape: tuple[int, ...]


class _Tracer(TorchDispatchMode):
    """Within the context, follows copies of parts of some tensors."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        self._origins = {_storage(t): (name, whole(shapes[name]), t) for name, t in self.tensors.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default and out.is_contiguous():
            view = self.find(args[0])
            if view is not None:
                self._origins[_storage(out)] = (view.source, view.slice, out)
        return out

    def find(self, tensor: torch.Tensor) -> ModuleSlice | None:
        """Return what a tensor is a part of, or None if it is no slice of a tensor."""
        origin = self._origins.get(_storage(tensor))
        if origin is None:
            return None
        source, outer, base = origin
        inner = slice_of(tensor, tuple(base.shape))
        if inner is None:
            return None
        if inner == whole(tuple(base.shape)):
            return ModuleSlice(source, outer, tuple(tensor.shape))
        if outer.extents != tuple(base.shape):
            return None
        start = tuple(a + b for a, b in zip(outer.start, inner.start, strict=True))
        return ModuleSlice(
            source,
            TensorSlice(start, tuple(a + n for a, n in zip(start, inner.extents, strict=True))),
            tuple(tensor.shape),
        )


def module_slices(convert: Callable[[Named], Named], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ModuleSlice]:
    """Return where each tensor of a checkpoint lies in the module's tensors.

    Args:
        convert: makes the tensors of a checkpoint of those of the module.
        shapes: of the module's tensors, by name.

    Raises:
        ModelError: a tensor of the checkpoint is not a part of one of the module's, or `convert` fails on tensors
            without memory.
    """
    tracer, views = _Tracer(shapes), {}

    def sources() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tracer.tensors.items()

    try:
        with tracer:
            for name, tensor in convert(sources()):
                view = tracer.find(tensor)
                if view is None:
                    raise ModelError(f"{name} is computed from the training weights and is no part of them")
                views[name] = view
    except ModelError:
        raise
    except Exception as error:  # a model's own conversion, with tensors that it does not expect
        raise ModelError(f"the conversion to a checkpoint fails without weights: {error!r}") from error
    return views


def within_shape(
    inner: TensorSlice, outer: TensorSlice, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of `inner` within a tensor that has the elements of `outer` in another shape.

    Args:
        inner: lies in `outer`.
        outer: the slice.
        shape: that of `outer`, but for dimensions of size 1.
    """
    sizes = [
        (a - o, n)
        for a, o, n, whole in zip(inner.start, outer.start, inner.extents, outer.extents, strict=True)
        if whole != 1
    ]
    if len(sizes) != sum(1 for size in shape if size != 1):
        raise ModelError(f"a tensor of shape {shape} is no part of shape {outer.extents}")
    offsets, extents = [], []
    for size in shape:
        offset, extent = (0, 1) if size == 1 else sizes.pop(0)
        offsets.append(offset)
        extents.append(extent)
    return tuple(offsets), tuple(extents)


def _storage(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
