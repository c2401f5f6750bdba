"""Slices of tensors on disk: what the ranks of one layout write, the ranks of any other can read.

Each rank writes one safetensors file, `slices_<rank>.safetensors`. Its entries are slices of whole tensors; the
metadata of the file say of which tensor, of what shape, and where the slice begins. Every training engine writes this
format under the names of Hugging Face checkpoints, so an engine reads what another one wrote.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hybridrl.errors import ModelError
from hybridrl.layouts.slices import TensorSlice, whole
from hybridrl.utils.files import use_umask

_METADATA = "slices"
_METADATA_BEFORE = "boxes"  # as earlier versions wrote it
_OFFSETS_OF_DCP = "DCP_SHARDING_INFO"  # of shards that `torch.distributed.checkpoint` wrote, as earlier versions did


class TensorSource(ABC):
    """Whole tensors by Hugging Face name, of which slices are read."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @property
    @abstractmethod
    def names(self) -> Iterable[str]:
        """Names of all tensors."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one of them."""

    @abstractmethod
    def read(self, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        """The elements of a slice of one of them, in main memory."""


@dataclass(frozen=True, slots=True)
class SavedSlice:
    """A slice of a tensor.

    Attributes:
        name, shape: of the whole tensor.
        slice: the elements.
        values: in the shape of the slice.
    """

    name: str
    shape: tuple[int, ...]
    slice: TensorSlice
    values: torch.Tensor


def copied(slices: Iterable[SavedSlice]) -> list[SavedSlice]:
    """Copy slices to main memory, so that they stay as they are while training goes on."""
    return [
        replace(saved, values=torch.empty_like(v, device="cpu").copy_(v)) for saved in slices for v in [saved.values]
    ]


def write_slices(folder: Path, rank: int, slices: Iterable[SavedSlice]) -> None:
    """Write the slices of one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, torch.Tensor] = {}
    places: dict[str, Any] = {}
    for number, saved in enumerate(slices):
        key = f"{saved.name}@{number}"
        values[key] = saved.values.detach().cpu().contiguous()
        places[key] = {"name": saved.name, "shape": list(saved.shape), "start": list(saved.slice.start)}
    path = folder / f"slices_{rank:05d}.safetensors"
    save_file(_separate(values), path, metadata={_METADATA: json.dumps(places)})
    use_umask(path)


def _separate(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors that share their memory with another, as views of one parameter do."""
    storages: set[int] = set()
    separate = {}
    for name, tensor in values.items():
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = (
            tensor.clone() if storage in storages or tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
        )
        storages.add(storage)
    return separate


@dataclass(frozen=True, slots=True)
class _Place:
    file: Any
    key: str


class ScatteredSlices(TensorSource):
    """Whole tensors of which slices lie in several files.

    A subclass adds the slices.
    """

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, dict[TensorSlice, _Place]] = defaultdict(dict)

    def _add(self, name: str, shape: tuple[int, ...] | None, tensor_slice: TensorSlice, file: Any, key: str) -> None:
        """Add a slice.

        Args:
            name, shape: of the whole tensor; None: it ends where the last of its slices ends.
            tensor_slice: the elements.
            file: has them; `get_tensor(key)` returns them, `get_slice(key)` something that can be indexed.
            key: their name there.
        """
        shape_so_far = self._shapes.get(name, shape or tensor_slice.stop)
        self._shapes[name] = shape or tuple(map(max, shape_so_far, tensor_slice.stop))
        self._places[name].setdefault(tensor_slice, _Place(file, key))

    @property
    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor was written."""
        tensor_slice, place = next(iter(self._places[name].items()))
        nothing = slice(0) if tensor_slice.start else ...  # a scalar has no empty slice
        dtype: torch.dtype = place.file.get_slice(place.key)[nothing].dtype
        return dtype

    def read(self, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        places = self._places[name]
        if tensor_slice in places:
            tensor: torch.Tensor = places[tensor_slice].file.get_tensor(places[tensor_slice].key)
            return tensor
        assembled: torch.Tensor | None = None
        elements = 0
        for at, place in places.items():
            common = tensor_slice.intersect(at)
            if common is None:
                continue
            values = place.file.get_slice(place.key)[common.within(at)]
            if assembled is None:
                assembled = torch.empty(tensor_slice.extents, dtype=values.dtype)
            assembled[common.within(tensor_slice)] = values
            elements += common.elements
        if assembled is None or elements != tensor_slice.elements:
            raise ModelError(
                f"checkpoint {self.where} has {elements} of the {tensor_slice.elements} elements of {name} at "
                f"{tensor_slice.start}; the file of a rank is missing. Resume from an earlier checkpoint"
            )
        return assembled

    def whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor whole."""
        for name, shape in self._shapes.items():
            yield name, self.read(name, whole(shape))


class SavedSlices(ScatteredSlices):
    """The slices in a folder, which read as whole tensors.

    Raises:
        ModelError: a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._open = ExitStack()
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"checkpoint {folder} has no slices_*.safetensors, so no training engine here wrote it")
        for path in paths:
            try:
                file = self._open.enter_context(safe_open(str(path), framework="pt"))
                places = _places(file)
            except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
                raise ModelError(f"checkpoint {path} cannot be read ({error}); resume from an earlier one") from error
            for key, (name, shape, start) in places.items():
                size = file.get_slice(key).get_shape()
                tensor_slice = TensorSlice(start, tuple(a + n for a, n in zip(start, size, strict=True)))
                self._add(name, shape, tensor_slice, file, key)

    def __exit__(self, *error: Any) -> None:
        self._open.close()


def _places(file: Any) -> dict[str, tuple[str, tuple[int, ...] | None, tuple[int, ...]]]:
    """Return the tensor name, tensor shape and start of each entry of a file.

    Shards of `torch.distributed.checkpoint` have no shape; it follows from the end of the last one.
    """
    metadata = file.metadata()
    key = next((key for key in (_METADATA, _METADATA_BEFORE) if key in metadata), None)
    if key is not None:
        slices = json.loads(metadata[key])
        return {key: (entry["name"], tuple(entry["shape"]), tuple(entry["start"])) for key, entry in slices.items()}
    offsets = json.loads(metadata[_OFFSETS_OF_DCP])
    return {key: (key, None, tuple(entry["saved_offsets"])) for key, entry in offsets.items()}


def slices_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[TensorSlice, int]]:
    """Return the slices that a range of a flattened tensor is, and where each begins in the range.

    A slice's elements lie next to each other in the range, in the slice's order.
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [(TensorSlice((start,), (stop,)), 0)]
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    slices: list[tuple[TensorSlice, int]] = []

    def within_row(row: int, begin: int, end: int) -> None:
        for tensor_slice, at in slices_of_range(shape[1:], begin - row * inner, end - row * inner):
            slices.append((TensorSlice((row, *tensor_slice.start), (row + 1, *tensor_slice.stop)), begin + at - start))

    if first > last:
        within_row(last, start, stop)
        return slices
    if start < first * inner:
        within_row(first - 1, start, first * inner)
    if first < last:
        rest = tuple(0 for _ in shape[1:])
        slices.append((TensorSlice((first, *rest), (last, *shape[1:])), first * inner - start))
    if last * inner < stop:
        within_row(last, last * inner, stop)
    return slices
