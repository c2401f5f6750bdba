"""Weights into Megatron's parameters and out of them, by their Hugging Face names.

A checkpoint is read slice by slice, so that a rank reads what it holds and nothing else. Export gathers whole tensors
in buckets over the ranks of one copy of the model; `export_shards` yields views of a rank's own parameters.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from hybridrl.engine.capabilities import WeightShard
from hybridrl.engine.megatron.mapping import LocalTensor, Piece, WeightMap
from hybridrl.engine.saved_slices import TensorSource
from hybridrl.errors import ModelError
from hybridrl.layouts.slices import TensorSlice, count, whole
from hybridrl.models.loading import WEIGHT_PATTERNS, check_weights
from hybridrl.models.model_config import checked_source
from hybridrl.models.surplus import is_further, warn_if_shortened
from hybridrl.models.value import HEAD_NAME
from hybridrl.utils import device

if TYPE_CHECKING:
    from hybridrl.engine.megatron.sharded_optimizer import Shard

#: Whole tensors are exported together until they have this many bytes.
BUCKET_BYTES = 64 << 20

#: The parts of an expert in a checkpoint: the tensor of all experts that may hold it, and which half of its rows it is.
_FUSED = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", None),
}
_LAYER = re.compile(r"(?:.*?\.)?layers\.(?P<layer>\d+)\.")
_EXPERT = re.compile(r"(?P<start>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight$")


Readable = Callable[[torch.Tensor], torch.Tensor]


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class InMemory(TensorSource):
    """A state dict, or files of PyTorch's format that are mapped into memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], where: str = "the state dict") -> None:
        super().__init__(where)
        self._tensors = tensors

    @property
    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        return self._tensors[name][tensor_slice.within(whole(self.shape(name)))]


class SafetensorsFiles(TensorSource):
    """Safetensors files of a folder. Tensors are read on demand."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._open = ExitStack()
        self._file_of: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = self._open.enter_context(safe_open(str(path), framework="pt"))
            self._file_of.update((name, file) for name in file.keys())

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    @property
    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        if not tensor_slice.start:
            return self._file_of[name].get_tensor(name)
        return self._file_of[name].get_slice(name)[tensor_slice.within(whole(self.shape(name)))]


def open_source(path: str | Path) -> TensorSource:
    """Open the weights of a model directory, or of a model on the hub.

    Raises:
        ModelError: there is no such directory, or its weights are missing or incomplete.
    """
    source = checked_source(path)
    if not isinstance(source, Path):
        from huggingface_hub import snapshot_download

        source = Path(snapshot_download(str(source), allow_patterns=[*WEIGHT_PATTERNS, "*.json"]))
    check_weights(source)
    if any(source.glob("*.safetensors")):
        return SafetensorsFiles(source)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("pytorch_model*.bin")):
        try:
            tensors |= torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # torch raises anything for a broken file
            raise ModelError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    return InMemory(tensors, str(source))


def load_hf(weights: WeightMap, source: TensorSource) -> None:
    """Fill this rank's parameters from a checkpoint. Rows that pad the vocabulary become 0.

    Raises:
        ModelError: the checkpoint lacks a tensor, has one of another shape, has tensors of this rank's layers or
            outside the layers that the family's table does not name, or an output layer that is not the embedding
            although they are tied.
    """
    reader = _Reader(source)
    for entry in weights.entries:
        if entry.may_be_absent and not all(reader.has(piece.name) for piece in entry.pieces):
            entry.tensor.detach().zero_()
        else:
            _fill(entry, reader)
    _check_unused(weights, source)
    _check_tied(weights, reader)


def load_masters(weights: WeightMap, source: TensorSource, shards: Iterable[Shard]) -> None:
    """Fill master weights that have more digits than the parameters, which were loaded from the same checkpoint."""
    reader = _Reader(source)
    entries = {(weights.chunks.index(entry.chunk), entry.name): entry for entry in weights.entries}
    for shard in shards:
        entry = entries[shard.chunk, shard.name]
        if shard.master.dtype == shard.parameter.dtype or not all(reader.has(piece.name) for piece in entry.pieces):
            continue
        whole = torch.zeros(entry.tensor.shape, dtype=shard.master.dtype)
        for piece in entry.pieces:
            piece.of(whole).copy_(reader.read(piece))
        shard.master.detach().copy_(whole.view(-1)[shard.start : shard.stop])


class _Reader:
    """Reads slices by the names of the table from checkpoints that have them in other forms."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.names = frozenset(source.names)

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def read(self, piece: Piece) -> torch.Tensor:
        location = self._find(piece.name)
        if location is None:
            raise ModelError(
                f"{self.source.where} has no {piece.name}; config.json and the weight files belong to different models"
            )
        name, offset, dims = location
        shape = self.source.shape(name)
        start = (*offset, *piece.slice.start)
        stop = (*(at + 1 for at in offset), *piece.slice.stop)
        expected: tuple[int, ...] = piece.shape
        if dims is not None:  # a half of the rows
            start = (offset[0], piece.slice.start[0] + dims * piece.shape[0], *piece.slice.start[1:])
            stop = (offset[0] + 1, piece.slice.stop[0] + dims * piece.shape[0], *piece.slice.stop[1:])
            expected = (2 * piece.shape[0], *piece.shape[1:])
        if shape[len(offset) :] != expected:
            raise ModelError(
                f"{name} in {self.source.where} has shape {list(shape[len(offset) :])}, and config.json asks for "
                f"{list(expected)}"
            )
        read = self.source.read(name, TensorSlice(start, stop))
        return read[0] if offset else read

    def _find(self, name: str) -> tuple[str, tuple[int, ...], int | None] | None:
        """The tensor that holds `name`, the index of its part there, and which half of the rows it is."""
        if name in self.names:
            return name, (), None
        if name.startswith("model.") and name.removeprefix("model.") in self.names:
            return name.removeprefix("model."), (), None  # saved without its head
        if (of := _EXPERT.match(name)) is not None:
            fused, half = _FUSED[of["part"]]
            if (together := f"{of['start']}.{fused}") in self.names:
                return together, (int(of["expert"]),), half
        return None


def _fill(entry: LocalTensor, reader: _Reader) -> None:
    tensor = entry.tensor.detach()
    if sum(piece.slice.elements for piece in entry.pieces) < tensor.numel():
        tensor.zero_()
    for piece in entry.pieces:
        piece.of(tensor).copy_(reader.read(piece))


def _check_unused(weights: WeightMap, source: TensorSource) -> None:
    """Refuse a checkpoint that has tensors which the table does not name, of this rank's layers or outside the layers.

    The heads of both kinds of model may be there: a value model may start from a language model, and the reverse.
    """
    own_names = {piece.name for entry in weights.entries for piece in entry.pieces}
    layers = {match.group("layer") for name in own_names if (match := _LAYER.match(name)) is not None}
    heads = {f"{HEAD_NAME}.weight", f"{HEAD_NAME}.bias", *weights.output_names}

    def is_known(name: str) -> bool:
        of_layer = _LAYER.match(name)
        if of_layer is not None and of_layer.group("layer") not in layers:
            return int(of_layer.group("layer")) < weights.layers or is_further(name, weights.config)  # another rank's
        return name in heads or weights.names(name) or _is_fused(name, own_names)

    surplus = sorted(
        name
        for name in source.names
        if not is_known(name)
        and not is_known(f"model.{name}")  # saved without its head
        and not any(re.search(pattern, name) for pattern in weights.family.unused)
    )
    if surplus and not warn_if_shortened(surplus, weights.config, source.where):
        raise ModelError(
            f"{source.where} has {len(surplus)} tensors that the table of {type(weights.family).__name__} does not "
            f"name, the first {surplus[0]}; the model would compute something else without them. Use strategy=fsdp2, "
            "or extend the table (docs/megatron_models.md)"
        )


def _check_tied(weights: WeightMap, reader: _Reader) -> None:
    """Refuse a checkpoint whose output layer differs from the embedding, which this model uses in its place."""
    if not weights.is_tied or weights.has_value_head:
        return
    for name in weights.output_names & reader.names:
        for entry in weights.entries:
            for piece in entry.pieces:
                if piece.name not in weights.embedding_names:
                    continue
                if not torch.equal(reader.read(replace(piece, name=name)), reader.read(piece)):
                    raise ModelError(
                        f"{reader.source.where}: {name} differs from {piece.name}, and config.json has "
                        "tie_word_embeddings=true, by which the model computes with one of them; set "
                        "model.override_config.tie_word_embeddings=False if they were trained apart"
                    )


def _is_fused(name: str, names: Iterable[str]) -> bool:
    """Whether a tensor has all experts of a layer of which `names` has some."""
    start, _, last = name.rpartition(".experts.")
    return last in {fused for fused, _ in _FUSED.values()} and any(
        other.startswith(f"{start}.experts.") for other in names
    )


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor of the model as the ranks of a copy of it hold it.

    Attributes:
        shape, dtype: of the whole tensor.
        is_buffer: whether it is a buffer, which is exported in its own dtype.
        of_expert: whether the ranks of the experts' group hold it.
        slices: by rank of the group, the slices that it sends. They cover the tensor once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool
    of_expert: bool
    slices: Mapping[int, tuple[TensorSlice, ...]]


class Exporter:
    """Gathers whole tensors over the ranks that hold one copy of the model together.

    Args:
        weights: this rank's map.

    It takes the groups from Megatron's parallel state, which must be this model's while it is made.
    """

    def __init__(self, weights: WeightMap) -> None:
        from megatron.core import parallel_state

        self.weights = weights
        self._groups = {
            False: parallel_state.get_model_parallel_group(),
            True: parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
        }
        self._is_first = {
            False: parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
            True: parallel_state.get_expert_data_parallel_rank() == 0,
        }
        self._specs: dict[str, _Whole] | None = None
        self._local: dict[tuple[str, TensorSlice], tuple[LocalTensor, Piece]] = {}
        for entry in weights.entries:
            for piece in entry.pieces:
                self._local[piece.name, piece.slice] = (entry, piece)

    def export(
        self, dtype: torch.dtype | None = None, readable: Readable = _itself
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the model whole, under its Hugging Face name. All ranks iterate together.

        Args:
            dtype: of parameters; None: their own. Buffers keep theirs.
            readable: returns a parameter, or its copy in main memory while it is offloaded.
        """
        bucket: list[str] = []
        kind: tuple[torch.dtype, bool] | None = None
        size = 0
        for name, spec in self._catalogue().items():
            this = (_exported(spec, dtype), spec.of_expert)
            if kind is not None and (size >= BUCKET_BYTES or this != kind):
                yield from self._gather(bucket, *kind, readable)
                bucket, size = [], 0
            kind = this
            bucket.append(name)
            size += prod(spec.shape) * this[0].itemsize
        if kind is not None:
            yield from self._gather(bucket, *kind, readable)

    def bytes(self, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of everything that `export` yields. All ranks call it together."""
        return sum(prod(spec.shape) * _exported(spec, dtype).itemsize for spec in self._catalogue().values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the model, by Hugging Face name. All ranks call it together."""
        return {name: spec.shape for name, spec in self._catalogue().items()}

    def is_first(self, entry: LocalTensor, piece: Piece) -> bool:
        """Whether this rank is the first of those that hold a piece. All ranks called `shapes` before."""
        here = dist.get_rank(self._groups[entry.of_expert])
        return self._is_first[entry.of_expert] and piece.slice in self._catalogue()[piece.name].slices.get(here, ())

    def _catalogue(self) -> dict[str, _Whole]:
        """Every tensor of the model, in an order that is the same on all ranks."""
        if self._specs is None:
            specs = {**self._of_group(False), **self._of_group(True)}
            self._specs = dict(sorted(specs.items(), key=lambda item: _natural(item[0])))
        return self._specs

    def _of_group(self, of_expert: bool) -> dict[str, _Whole]:
        group = self._groups[of_expert]
        ours = [
            (name, piece.shape, entry.tensor.dtype, not isinstance(entry.tensor, torch.nn.Parameter), tensor_slice)
            for (name, tensor_slice), (entry, piece) in self._local.items()
            if entry.of_expert is of_expert
        ]
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, ours, group=group)
        forms: dict[str, tuple[tuple[int, ...], torch.dtype, bool]] = {}
        slices: dict[str, dict[TensorSlice, int]] = defaultdict(dict)
        for rank, theirs in enumerate(gathered):
            for name, shape, dtype, is_buffer, tensor_slice in theirs:
                forms[name] = (shape, dtype, is_buffer)
                slices[name].setdefault(tensor_slice, rank)
        specs: dict[str, _Whole] = {}
        for name, owners in slices.items():
            shape, dtype, is_buffer = forms[name]
            if count(owners) != prod(shape):
                raise ModelError(f"{name}: the ranks hold {count(owners)} of its {prod(shape)} elements")
            by_rank: dict[int, tuple[TensorSlice, ...]] = {}
            for tensor_slice, rank in owners.items():
                by_rank[rank] = (*by_rank.get(rank, ()), tensor_slice)
            specs[name] = _Whole(shape, dtype, is_buffer, of_expert, by_rank)
        return specs

    def _gather(
        self, names: Sequence[str], dtype: torch.dtype, of_expert: bool, readable: Readable
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather some tensors; each rank sends its parts of all of them at once."""
        group, here = self._groups[of_expert], device.current_device()
        catalogue = self._catalogue()
        me = dist.get_rank(group)
        senders = sorted({rank for name in names for rank in catalogue[name].slices})
        flat, waiting = {}, []
        for rank in senders:
            parts = [(name, tensor_slice) for name in names for tensor_slice in catalogue[name].slices.get(rank, ())]
            if rank == me:
                views = [
                    self._view(name, tensor_slice, readable).to(here, dtype).reshape(-1) for name, tensor_slice in parts
                ]
                flat[rank] = torch.cat(views)
            else:
                flat[rank] = torch.empty(
                    sum(tensor_slice.elements for _, tensor_slice in parts), dtype=dtype, device=here
                )
            if dist.get_world_size(group) > 1:
                waiting.append(dist.broadcast(flat[rank], group_src=rank, group=group, async_op=True))
        for work in waiting:
            work.wait()
        read = dict.fromkeys(senders, 0)
        for name in names:
            spec = catalogue[name]
            tensor = torch.empty(spec.shape, dtype=dtype, device=here)
            for rank, slices in spec.slices.items():
                for tensor_slice in slices:
                    view = tensor[tensor_slice.within(whole(spec.shape))]
                    view.copy_(flat[rank][read[rank] : read[rank] + tensor_slice.elements].view(view.shape))
                    read[rank] += tensor_slice.elements
            yield name, tensor

    def _view(self, name: str, tensor_slice: TensorSlice, readable: Readable) -> torch.Tensor:
        entry, piece = self._local[name, tensor_slice]
        return piece.of(readable(entry.tensor.detach()))


def _exported(spec: _Whole, dtype: torch.dtype | None) -> torch.dtype:
    return spec.dtype if dtype is None or spec.is_buffer else dtype


def _natural(name: str) -> list[Any]:
    """A key that sorts numbers by their value."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def export_shards(weights: WeightMap) -> Iterator[WeightShard]:
    """Yield this rank's part of every tensor, by Hugging Face name, as views of its parameters.

    A tensor that does not lie in one piece in Megatron's parameter (query, key and value of several KV heads) comes in
    several disjoint parts.
    """
    for entry in weights.entries:
        local = entry.tensor.detach()
        is_buffer = not isinstance(entry.tensor, torch.nn.Parameter)
        for piece in entry.pieces:
            yield WeightShard(piece.name, piece.shape, piece.slice.start, piece.of(local), keeps_dtype=is_buffer)
