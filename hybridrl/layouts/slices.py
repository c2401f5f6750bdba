"""Slices: which elements of each tensor a device holds under a layout.

A slice is a range of indices per dimension of the whole tensor, as the Hugging Face model has it. Every cut of a layout
(rows, columns, heads, experts, the halves of a fused gate and up projection) is a set of disjoint slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hybridrl.errors import ConfigError
from hybridrl.layouts.topology import Coordinates, Layout, ParallelLayout, ShardedLayout


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The elements with `start[d] <= index[d] < stop[d]` in every dimension d."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def of_extents(cls, start: tuple[int, ...], extents: Sequence[int]) -> TensorSlice:
        """Return the slice that begins at `start` and has a size per dimension."""
        return cls(start, tuple(a + size for a, size in zip(start, extents, strict=True)))

    @property
    def elements(self) -> int:
        """Number of elements in the slice."""
        return prod(self.extents)

    @property
    def extents(self) -> tuple[int, ...]:
        """Size of the slice per dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    def within(self, outer: TensorSlice) -> tuple[slice, ...]:
        """Return the index of this slice in a tensor that holds the slice `outer`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True))

    def intersect(self, other: TensorSlice) -> TensorSlice | None:
        """Return the elements that both have, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return TensorSlice(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


#: The disjoint slices of one tensor that a device holds.
TensorSlices = tuple[TensorSlice, ...]


def overlap(ours: TensorSlices, theirs: TensorSlices) -> int:
    """Return how many elements two sets of slices share."""
    common = (a.intersect(b) for a in ours for b in theirs)
    return sum(tensor_slice.elements for tensor_slice in common if tensor_slice is not None)


@dataclass(frozen=True, slots=True)
class Cut:
    """Rule by which tensor and expert parallelism cut a tensor.

    Attributes:
        dim: the dimension that tensor parallelism cuts; None: every device of the stage holds the whole tensor.
        sections: sizes of the parts along `dim` that are cut one by one (gate and up in one tensor); empty: one part.
        heads: how many heads lie along `dim`, which no cut may split; 0: any element may be the border.
        kv: whether these are KV heads, which engines share between devices if there are fewer heads than devices.
        vocabulary: whether `dim` is the vocabulary, which is padded before it is cut.
        expert_dim: the dimension that counts experts; None: the tensor belongs to no expert.
    """

    dim: int | None = None
    sections: tuple[int, ...] = ()
    heads: int = 0
    kv: bool = False
    vocabulary: bool = False
    expert_dim: int | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the model.

    Attributes:
        name: its Hugging Face name.
        shape: of the whole tensor.
        cut: how it is cut.
        layer: its decoder layer; None: outside the layers.
        first, last: outside the layers, whether the first and the last pipeline stage hold it (both: tied embeddings).
    """

    name: str
    shape: tuple[int, ...]
    cut: Cut = Cut()
    layer: int | None = None
    first: bool = False
    last: bool = False

    @property
    def elements(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)


def whole(shape: tuple[int, ...]) -> TensorSlice:
    """Return the slice of a whole tensor."""
    return TensorSlice((0,) * len(shape), shape)


def _range(index: int, parts: int, size: int, cut: Cut, layout: ParallelLayout) -> tuple[int, int]:
    """Return the part number `index` of `parts` of a dimension of `size` elements."""
    if cut.vocabulary:
        multiple = layout.vocabulary_multiple
        multiple = multiple if multiple % parts == 0 else multiple * parts
        part = -(-size // multiple) * multiple // parts
        return min(index * part, size), min((index + 1) * part, size)
    if cut.heads:
        if cut.kv and layout.shares_kv_heads and parts > cut.heads and parts % cut.heads == 0:
            index, parts = index // (parts // cut.heads), cut.heads
        if cut.heads % parts:
            heads = "KV heads" if cut.kv else "attention heads"
            fit = [number for number in range(1, cut.heads + 1) if cut.heads % number == 0]
            more = ", or a multiple of their number" if cut.kv and layout.shares_kv_heads else ""
            raise ConfigError(
                f"{cut.heads} {heads} cannot be divided by a tensor parallel size of {parts}; it can be one of "
                f"{fit}{more}"
            )
    if size % parts:
        raise ConfigError(f"a dimension of {size} does not divide into {parts} tensor parallel parts")
    return index * (size // parts), (index + 1) * (size // parts)


@lru_cache(maxsize=1 << 16)
def _cut_slices(shape: tuple[int, ...], cut: Cut, layout: ParallelLayout, at: Coordinates) -> TensorSlices:
    start, stop = [0] * len(shape), list(shape)
    index, parts = at.tensor, layout.sizes.tensor
    if cut.expert_dim is not None:
        experts, groups = shape[cut.expert_dim], layout.sizes.expert
        if experts % groups:
            fit = [number for number in range(1, experts + 1) if experts % number == 0]
            raise ConfigError(f"{experts} experts do not divide into ep={groups}; ep can be one of {fit}")
        start[cut.expert_dim] = at.expert * (experts // groups)
        stop[cut.expert_dim] = start[cut.expert_dim] + experts // groups
        index, parts = at.expert_tensor, layout.sizes.expert_tensor
    if cut.dim is None:
        return (TensorSlice(tuple(start), tuple(stop)),)
    slices, offset = [], 0
    for size in cut.sections or (shape[cut.dim],):
        begin, end = _range(index, parts, size, cut, layout)
        if begin < end:
            start[cut.dim], stop[cut.dim] = offset + begin, offset + end
            slices.append(TensorSlice(tuple(start), tuple(stop)))
        offset += size
    return tuple(slices)


@lru_cache(maxsize=64)
def _stages(layout: ParallelLayout, layers: int) -> tuple[int, ...]:
    return layout.stages(layers)


@lru_cache(maxsize=1 << 16)
def _chunk(shape: tuple[int, ...], shards: int, index: int) -> TensorSlices:
    size = -(-shape[0] // shards)
    begin, end = min(index * size, shape[0]), min((index + 1) * size, shape[0])
    return (TensorSlice((begin, *(0 for _ in shape[1:])), (end, *shape[1:])),) if begin < end else ()


@lru_cache(maxsize=1 << 16)
def _expert_shard(shape: tuple[int, ...], expert_dim: int, layout: ShardedLayout, index: int) -> TensorSlices:
    """The part of experts that FSDP2 with expert parallelism gives a device; groups of experts are neighbours."""
    devices, start, stop = layout.shard // layout.expert, [0] * len(shape), list(shape)
    own = shape[expert_dim] // layout.expert
    cut = expert_dim if own % devices == 0 else expert_dim + 1
    parts = ((expert_dim, layout.expert, index % layout.expert), (cut, devices, index // layout.expert))
    for dimension, count_of_parts, part in parts:
        extent = stop[dimension] - start[dimension]
        if extent % count_of_parts:
            raise ConfigError(f"{shape} does not divide into {layout.describe()} along dimension {dimension}")
        start[dimension] += part * (extent // count_of_parts)
        stop[dimension] = start[dimension] + extent // count_of_parts
    return (TensorSlice(tuple(start), tuple(stop)),)


def slices_of(spec: TensorSpec, layout: Layout, at: Coordinates, layers: int) -> TensorSlices:
    """Return the slices of a tensor that the devices with given coordinates hold.

    Args:
        spec: the tensor.
        layout: the layout.
        at: coordinates in the layout.
        layers: the model's decoder layers.

    Raises:
        ConfigError: the tensor cannot be cut so; the error names the sizes that fit.
    """
    if isinstance(layout, ShardedLayout):
        if layout.expert > 1 and spec.cut.expert_dim is not None:
            return _expert_shard(spec.shape, spec.cut.expert_dim, layout, at.tensor)
        return _chunk(spec.shape, layout.shard, at.tensor)
    if not isinstance(layout, ParallelLayout):
        raise TypeError(f"{type(layout).__name__} is neither a ShardedLayout nor a ParallelLayout")
    if spec.layer is None:
        stages = {0} if spec.first else set()
        stages |= {layout.sizes.pipeline - 1} if spec.last else set()
    else:
        stages = {_stages(layout, layers)[spec.layer]}
    if at.pipeline not in stages:
        return ()
    try:
        return _cut_slices(spec.shape, spec.cut, layout, at)
    except ConfigError as error:
        raise ConfigError(f"{spec.name}: {error}") from None


def count(slices: Iterable[TensorSlice]) -> int:
    """Return the elements of disjoint slices."""
    return sum(tensor_slice.elements for tensor_slice in slices)
