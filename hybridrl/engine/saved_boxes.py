"""Boxes of tensors on disk: what the ranks of one layout write, the ranks of any other can read.

Each rank writes one safetensors file, `boxes_<rank>.safetensors`. Its entries are boxes of whole tensors; the metadata
of the file say of which tensor, of what shape, and where the box begins. Every training engine writes this format under
the names of Hugging Face checkpoints, so an engine reads what another one wrote.
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
from hybridrl.hybrid_engine.shards import Box, whole
from hybridrl.utils.files import use_umask

_METADATA = "boxes"
_OFFSETS_OF_DCP = "DCP_SHARDING_INFO"  # of shards that `torch.distributed.checkpoint` wrote, as earlier versions did


class TensorSource(ABC):
    """Whole tensors by Hugging Face name, of which boxes are read."""

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
    def read(self, name: str, box: Box) -> torch.Tensor:
        """The elements of a box of one of them, in main memory."""


@dataclass(frozen=True, slots=True)
class SavedBox:
    """A box of a tensor.

    Attributes:
        name, shape: of the whole tensor.
        box: the elements.
        values: in the shape of the box.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    values: torch.Tensor


def copied(boxes: Iterable[SavedBox]) -> list[SavedBox]:
    """Copy boxes to main memory, so that they stay as they are while training goes on."""
    return [
        replace(saved, values=torch.empty_like(v, device="cpu").copy_(v)) for saved in boxes for v in [saved.values]
    ]


def write_boxes(folder: Path, rank: int, boxes: Iterable[SavedBox]) -> None:
    """Write the boxes of one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, torch.Tensor] = {}
    places: dict[str, Any] = {}
    for number, saved in enumerate(boxes):
        key = f"{saved.name}@{number}"
        values[key] = saved.values.detach().cpu().contiguous()
        places[key] = {"name": saved.name, "shape": list(saved.shape), "start": list(saved.box.start)}
    path = folder / f"boxes_{rank:05d}.safetensors"
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


class ScatteredBoxes(TensorSource):
    """Whole tensors of which boxes lie in several files.

    A subclass adds the boxes.
    """

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, dict[Box, _Place]] = defaultdict(dict)

    def _add(self, name: str, shape: tuple[int, ...] | None, box: Box, file: Any, key: str) -> None:
        """Add a box.

        Args:
            name, shape: of the whole tensor; None: it ends where the last of its boxes ends.
            box: the elements.
            file: has them; `get_tensor(key)` returns them, `get_slice(key)` something that can be indexed.
            key: their name there.
        """
        shape_so_far = self._shapes.get(name, shape or box.stop)
        self._shapes[name] = shape or tuple(map(max, shape_so_far, box.stop))
        self._places[name].setdefault(box, _Place(file, key))

    @property
    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor was written."""
        box, place = next(iter(self._places[name].items()))
        nothing = slice(0) if box.start else ...  # a scalar has no empty slice
        dtype: torch.dtype = place.file.get_slice(place.key)[nothing].dtype
        return dtype

    def read(self, name: str, box: Box) -> torch.Tensor:
        places = self._places[name]
        if box in places:
            tensor: torch.Tensor = places[box].file.get_tensor(places[box].key)
            return tensor
        assembled: torch.Tensor | None = None
        elements = 0
        for at, place in places.items():
            common = box.intersect(at)
            if common is None:
                continue
            values = place.file.get_slice(place.key)[common.within(at)]
            if assembled is None:
                assembled = torch.empty(box.extents, dtype=values.dtype)
            assembled[common.within(box)] = values
            elements += common.elements
        if assembled is None or elements != box.elements:
            raise ModelError(
                f"checkpoint {self.where} has {elements} of the {box.elements} elements of {name} at {box.start}; the "
                "file of a rank is missing. Resume from an earlier checkpoint"
            )
        return assembled

    def whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor whole."""
        for name, shape in self._shapes.items():
            yield name, self.read(name, whole(shape))


class SavedBoxes(ScatteredBoxes):
    """The boxes in a folder, which read as whole tensors.

    Raises:
        ModelError: a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._open = ExitStack()
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"checkpoint {folder} has no boxes_*.safetensors, so no training engine here wrote it")
        for path in paths:
            try:
                file = self._open.enter_context(safe_open(str(path), framework="pt"))
                places = _places(file)
            except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
                raise ModelError(f"checkpoint {path} cannot be read ({error}); resume from an earlier one") from error
            for key, (name, shape, start) in places.items():
                size = file.get_slice(key).get_shape()
                box = Box(start, tuple(a + n for a, n in zip(start, size, strict=True)))
                self._add(name, shape, box, file, key)

    def __exit__(self, *error: Any) -> None:
        self._open.close()


def _places(file: Any) -> dict[str, tuple[str, tuple[int, ...] | None, tuple[int, ...]]]:
    """Return the tensor name, tensor shape and start of each entry of a file.

    Shards of `torch.distributed.checkpoint` have no shape; it follows from the end of the last one.
    """
    metadata = file.metadata()
    if _METADATA in metadata:
        boxes = json.loads(metadata[_METADATA])
        return {key: (entry["name"], tuple(entry["shape"]), tuple(entry["start"])) for key, entry in boxes.items()}
    offsets = json.loads(metadata[_OFFSETS_OF_DCP])
    return {key: (key, None, tuple(entry["saved_offsets"])) for key, entry in offsets.items()}


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[Box, int]]:
    """Return the boxes that a range of a flattened tensor is, and where each begins in the range.

    A box's elements lie next to each other in the range, in the box's order.
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [(Box((start,), (stop,)), 0)]
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    boxes: list[tuple[Box, int]] = []

    def within_row(row: int, begin: int, end: int) -> None:
        for box, at in boxes_of_range(shape[1:], begin - row * inner, end - row * inner):
            boxes.append((Box((row, *box.start), (row + 1, *box.stop)), begin + at - start))

    if first > last:
        within_row(last, start, stop)
        return boxes
    if start < first * inner:
        within_row(first - 1, start, first * inner)
    if first < last:
        rest = tuple(0 for _ in shape[1:])
        boxes.append((Box((first, *rest), (last, *shape[1:])), first * inner - start))
    if last * inner < stop:
        within_row(last, last * inner, stop)
    return boxes
