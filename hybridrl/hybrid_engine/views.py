"""Views: the box of a module's tensor that each checkpoint tensor is, where the module stores several in one.

The conversion to the form of checkpoints is run once with tensors that have a shape and no memory. What it splits,
squeezes or copies stays traceable to the elements that it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.record import box_of
from hybridrl.hybrid_engine.shards import Box, whole

Named = Iterable[tuple[str, torch.Tensor]]


class View(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        source: the module's tensor that holds it.
        box: its elements there, in the same order.
        shape: of the tensor in the checkpoint; it may lack dimensions of size 1 that the box has.
    """

    source: str
    box: Box
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
                self._origins[_storage(out)] = (view.source, view.box, out)
        return out

    def find(self, tensor: torch.Tensor) -> View | None:
        """Return what a tensor is a part of, or None if it is no box of a tensor."""
        origin = self._origins.get(_storage(tensor))
        if origin is None:
            return None
        source, outer, base = origin
        inner = box_of(tensor, tuple(base.shape))
        if inner is None:
            return None
        if inner == whole(tuple(base.shape)):
            return View(source, outer, tuple(tensor.shape))
        if outer.extents != tuple(base.shape):
            return None
        start = tuple(a + b for a, b in zip(outer.start, inner.start, strict=True))
        return View(
            source, Box(start, tuple(a + n for a, n in zip(start, inner.extents, strict=True))), tuple(tensor.shape)
        )


def checkpoint_views(convert: Callable[[Named], Named], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, View]:
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


def within_shape(part: Box, box: Box, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of a part of `box` within a tensor that has the box's elements in another shape.

    Args:
        part: lies in the box.
        shape: that of the box, but for dimensions of size 1.
    """
    sizes = [
        (a - o, n)
        for a, o, n, whole in zip(part.start, box.start, part.extents, box.extents, strict=True)
        if whole != 1
    ]
    if len(sizes) != sum(1 for size in shape if size != 1):
        raise ModelError(f"a tensor of shape {shape} is no part of shape {box.extents}")
    offsets, extents = [], []
    for size in shape:
        offset, extent = (0, 1) if size == 1 else sizes.pop(0)
        offsets.append(offset)
        extents.append(extent)
    return tuple(offsets), tuple(extents)


def _storage(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
