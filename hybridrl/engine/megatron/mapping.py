"""The vocabulary of a model family's table, and the code that applies it.

A family says how a Hugging Face model is built with Megatron-core, and which parts of which Hugging Face tensors each
of Megatron's parameters holds. The second is a table of rules: a pattern of Megatron's parameter names, and a `Kind`
with the Hugging Face names. A kind turns a local parameter into `Piece`s: slices of Hugging Face tensors, and where
they lie in the parameter. Loading, exporting and checkpoints need nothing else.

Adding a model is one file, see docs/megatron_models.md.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig

from hybridrl.errors import ModelError
from hybridrl.layouts.slices import TensorSlice
from hybridrl.models.kinds import KINDS
from hybridrl.models.value import HEAD_NAME
from hybridrl.registry import MEGATRON_FAMILIES
from hybridrl.utils.entry_metadata import EntryMetadata

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
#: Megatron pads the vocabulary to a multiple of this, times the tensor parallel size.
VOCABULARY_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a Hugging Face tensor that a local parameter holds.

    Attributes:
        name: of the Hugging Face tensor.
        shape: of the whole Hugging Face tensor.
        slice: which elements of it.
        at: the index in the local parameter where the slice begins, per dimension. Elements are in the same order.
    """

    name: str
    shape: tuple[int, ...]
    slice: TensorSlice
    at: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the view of the local parameter that the slice is."""
        return local[tuple(slice(start, start + size) for start, size in zip(self.at, self.slice.extents, strict=True))]


@dataclass(frozen=True, slots=True)
class Ranks:
    """A rank's place in the layout, and its sizes, as far as weights depend on them."""

    tensor: int = 0
    tensors: int = 1
    expert: int = 0
    experts: int = 1
    expert_tensor: int = 0
    expert_tensors: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """Read them from Megatron's parallel state."""
        from megatron.core import parallel_state

        return cls(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )


@dataclass(frozen=True, slots=True)
class Local:
    """Description of a local parameter, for a `Kind`.

    Attributes:
        name: its name, for errors.
        shape: its shape on this rank.
        rank, ranks: which of how many parts it is.
        is_cut: whether Megatron marks it as a part of a larger tensor.
        model_fields: the family's `transformer_kwargs`, and `vocab_size`.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    ranks: int
    is_cut: bool
    model_fields: Mapping[str, Any]


class Kind(ABC):
    """Rule by which one of Megatron's parameters is made of Hugging Face tensors.

    Args:
        names: the Hugging Face names. `{layer}` and `{expert}` stand for the numbers in the whole model.
        may_be_absent: the checkpoint may lack the tensors; the parameter is then filled with zeros.
    """

    #: how many Hugging Face tensors it takes; 0: any number
    count: ClassVar[int] = 1

    def __init__(self, *names: str, may_be_absent: bool = False) -> None:
        if self.count and len(names) != self.count:
            raise ModelError(f"{type(self).__name__} takes {self.count} Hugging Face names; found {', '.join(names)}")
        self.names = names
        self.may_be_absent = may_be_absent

    def named(self, numbers: Mapping[str, str]) -> list[str]:
        """The Hugging Face names with the numbers of a layer and an expert."""
        return [name.format(**numbers) for name in self.names]

    @abstractmethod
    def pieces(self, names: Sequence[str], local: Local) -> list[Piece]:
        """Return the slices that a local parameter holds.

        Args:
            names: the Hugging Face names, with their numbers.
            local: the parameter.
        """


def part(name: str, local: Local, dim: int | None, at: int = 0, rows: int | None = None) -> Piece:
    """Return the piece of a tensor that is cut into equal parts along one dimension.

    Args:
        name: Hugging Face name.
        local: the parameter, which holds one part.
        dim: the dimension that is cut; None: the part is the whole tensor.
        at: where the part begins in the local parameter, along its first dimension.
        rows: how many rows of the local parameter it has; None: all.
    """
    size = (local.shape[0] if rows is None else rows, *local.shape[1:])
    start, shape = [0] * len(size), list(size)
    if dim is not None:
        start[dim], shape[dim] = local.rank * size[dim], local.ranks * size[dim]
    tensor_slice = TensorSlice(tuple(start), tuple(a + n for a, n in zip(start, size, strict=True)))
    return Piece(name, tuple(shape), tensor_slice, (at, *(0 for _ in size[1:])))


class Replicated(Kind):
    """Every rank holds the whole tensor."""

    def pieces(self, names: Sequence[str], local: Local) -> list[Piece]:
        return [part(names[0], local, None)]


class ColumnParallel(Kind):
    """The output features (dimension 0) are cut. Biases, too."""

    def pieces(self, names: Sequence[str], local: Local) -> list[Piece]:
        return [part(names[0], local, 0)]


class ColumnParallelIfCut(Kind):
    """MLA's down projections: cut in Megatron's own layers, and replicated in those of Transformer Engine."""

    def pieces(self, names: Sequence[str], local: Local) -> list[Piece]:
        return [part(names[0], local, 0 if local.is_cut else None)]


class RowParallel(Kind):
    """The input features (dimension 1) are cut. A bias is replicated."""

    def pieces(self, names: Sequence[str], local: Local) -> list[Piece]:
        return [part(names[0], local, 1 if len(local.shape) > 1 else None)]


class Vocabulary(Kind):
    """The vocabulary (dimension 0) is padded and cut. Rows of the padding belong to no tensor."""

    def pieces(self, names: Sequence[str], local: Local) -> list[Piece]:
        rows, size = int(local.model_fields["vocab_size"]), local.shape[0]
        start, stop = min(local.rank * size, rows), min((local.rank + 1) * size, rows)
        if local.ranks * size < rows:
            raise ModelError(f"{local.name}: {local.ranks} parts of {size} rows are less than the vocabulary of {rows}")
        if start == stop:
            return []
        rest = local.shape[1:]
        tensor_slice = TensorSlice((start, *(0 for _ in rest)), (stop, *rest))
        return [Piece(names[0], (rows, *rest), tensor_slice, (0,) * len(local.shape))]


class QueryKeyValue(Kind):
    """Query, key and value in one tensor: for each KV head the rows of its query heads, of its key and of its value."""

    count = 3

    def pieces(self, names: Sequence[str], local: Local) -> list[Piece]:
        heads, groups = int(local.model_fields["num_attention_heads"]), int(local.model_fields["num_query_groups"])
        width = int(local.model_fields["kv_channels"])
        if groups % local.ranks:
            fit = [size for size in range(1, groups + 1) if groups % size == 0]
            raise ModelError(
                f"tensor_model_parallel_size={local.ranks} does not divide the model's {groups} KV heads "
                f"(num_key_value_heads); use one of {fit}"
            )
        pieces, row, rest = [], 0, local.shape[1:]
        for group in range(local.rank * groups // local.ranks, (local.rank + 1) * groups // local.ranks):
            for name, per_group in zip(names, (heads // groups, 1, 1), strict=True):
                rows = per_group * width
                tensor_slice = TensorSlice((group * rows, *(0 for _ in rest)), ((group + 1) * rows, *rest))
                pieces.append(Piece(name, (groups * rows, *rest), tensor_slice, (row, *(0 for _ in rest))))
                row += rows
        if row != local.shape[0]:
            raise ModelError(f"{local.name} has {local.shape[0]} rows, and the model's heads make {row}")
        return pieces


class Stacked(Kind):
    """Tensors of the same shape, each cut along dimension 0, their parts one after the other: gate and up."""

    count = 0

    def pieces(self, names: Sequence[str], local: Local) -> list[Piece]:
        rows, rest = divmod(local.shape[0], len(names))
        if rest:
            raise ModelError(f"{local.name} has {local.shape[0]} rows, which do not divide into {', '.join(names)}")
        return [part(name, local, 0, at=index * rows, rows=rows) for index, name in enumerate(names)]


class Family(ABC):
    """Rules to build the models of one architecture with Megatron-core, and to find their weights.

    Attributes:
        rules: Megatron's parameter names (of its local layers) and the kind of each. `{layer}` and `{expert}` stand
            for numbers. Entries for parameters that a model does not have do no harm.
    """

    rules: ClassVar[Mapping[str, Kind]] = {}
    #: patterns of Hugging Face names that a checkpoint may have and the model does not use
    unused: ClassVar[tuple[str, ...]] = (r"rotary_emb\.inv_freq$",)

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse what Megatron-core cannot represent.

        Raises:
            ModelError: naming the field of config.json, its value and what is possible.
        """
        return

    @abstractmethod
    def transformer_kwargs(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Fields of Megatron's `TransformerConfig`, or of `MLATransformerConfig` if `multi_latent_attention` is set."""

    @abstractmethod
    def model_kwargs(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Arguments of Megatron's `GPTModel` that follow from the model: positions, tied embeddings."""

    def finish(self, config: PreTrainedConfig, chunk: Any) -> None:
        """Change a chunk after it was built, if the architecture computes something that `GPTModel` does not."""
        return


FamilyT = TypeVar("FamilyT", bound=type[Family])


def register_family(model_type: str) -> Callable[[FamilyT], FamilyT]:
    """Class decorator of a `Family`.

    Args:
        model_type: `model_type` of config.json.

    Raises:
        ModelError: another class has the name already.
    """

    def add(family: FamilyT) -> FamilyT:
        MEGATRON_FAMILIES.add(model_type, family, EntryMetadata())
        return family

    return add


def text_config(config: PreTrainedConfig) -> Any:
    """Return the configuration of the language model."""
    return config.get_text_config()


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a model.

    Raises:
        ModelError: there is none, or Megatron-core cannot represent this model of it.
    """
    model_type = str(getattr(config, "model_type", None))
    if not MEGATRON_FAMILIES.knows(model_type):
        raise ModelError(
            f"strategy=megatron cannot build a model of model_type={model_type!r}: there is no table of its weights. "
            f"There is one for {', '.join(MEGATRON_FAMILIES.names())}. Use strategy=fsdp2, or add a table "
            "(docs/megatron_models.md)"
        )
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"strategy=megatron cannot load the quantized weights of this {model_type} (quantization_config in "
            "config.json); use a checkpoint in bfloat16 or float32"
        )
    family: Family = MEGATRON_FAMILIES.get(model_type)()
    family.check(config)
    return family


def padded_vocabulary(size: int, tensors: int) -> int:
    """Return the rows of Megatron's embedding for a vocabulary of `size` cut into `tensors` parts."""
    multiple = VOCABULARY_MULTIPLE * tensors
    return -(-size // multiple) * multiple


#: Names of parameters in Transformer Engine's layers, and those of Megatron's own layers.
_SAME_AS = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r"input_layernorm.\1"),
    (re.compile(r"self_attention\.linear_q_up_proj\.layer_norm_(weight|bias)$"), r"self_attention.q_layernorm.\1"),
    (re.compile(r"self_attention\.linear_kv_up_proj\.layer_norm_(weight|bias)$"), r"self_attention.kv_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r"pre_mlp_layernorm.\1"),
    (re.compile(r"experts\.(linear_fc[12])\.(weight|bias)(\d+)$"), r"experts.local_experts.\3.\1.\2"),
)
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=experts\.local_experts\.)\d+(?=\.)")


def local_layers_name(name: str) -> str:
    """Return the name that a parameter of Transformer Engine's layers has in Megatron's own."""
    for pattern, same in _SAME_AS:
        name = pattern.sub(same, name)
    return name


def _compiled(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern)
    for number in ("layer", "expert"):
        escaped = escaped.replace(re.escape(f"{{{number}}}"), rf"(?P<{number}>\d+)")
    return re.compile(escaped + "$")


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A parameter, or a saved buffer, of this rank.

    Attributes:
        chunk: the chunk of the model that has it.
        name: its name in the chunk.
        pieces: what it holds.
        of_expert: whether it belongs to an expert, and is cut by expert parallelism.
        may_be_absent: see `Kind`.
    """

    chunk: nn.Module
    name: str
    pieces: tuple[Piece, ...]
    of_expert: bool
    may_be_absent: bool

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter or buffer itself."""
        module, _, last = self.name.rpartition(".")
        tensor = getattr(self.chunk.get_submodule(module), last)
        assert isinstance(tensor, torch.Tensor)
        return tensor


class WeightMap:
    """Map from each parameter of this rank to the parts of Hugging Face tensors that it holds.

    Args:
        family: the model's family.
        config: its Hugging Face configuration.
        chunks: this rank's parts of the model, one per virtual pipeline stage.
        ranks: this rank's place; None: from Megatron's parallel state.
        model_type: `language_model` or `value_model`, whose head stands in place of the vocabulary's.

    Attributes:
        has_value_head: whether a value head stands in place of the output layer.
        is_tied: whether a language model's output layer is its embedding.
        embedding_names, output_names: Hugging Face names of the embedding and of a language model's output layer.

    Raises:
        ModelError: a parameter has no rule, or cannot be cut as the layout requires.
    """

    def __init__(
        self,
        family: Family,
        config: PreTrainedConfig,
        chunks: Sequence[nn.Module],
        ranks: Ranks | None = None,
        model_type: str = "language_model",
    ) -> None:
        self.family, self.config, self.chunks = family, config, list(chunks)
        self.has_value_head = not KINDS[model_type].predicts_tokens
        self.ranks = Ranks.current() if ranks is None else ranks
        text = text_config(config)
        self.layers = int(text.num_hidden_layers)
        self._model_kwargs = {**family.transformer_kwargs(config), "vocab_size": int(text.vocab_size)}
        self.is_tied = bool(family.model_kwargs(config).get("share_embeddings_and_output_weights"))
        self.embedding_names = frozenset(family.rules[_EMBEDDING].names)
        self.output_names = frozenset(family.rules[_OUTPUT].names)
        self._rules = [(_compiled(pattern), kind) for pattern, kind in self._table().items()]
        self._named = [_compiled(name) for _, kind in self._rules for name in kind.names]
        self.entries = [entry for chunk in self.chunks for entry in self._entries(chunk)]

    def parameters(self) -> Iterator[tuple[str, torch.Tensor, tuple[Piece, ...]]]:
        """Yield name, tensor and pieces of each parameter and saved buffer of this rank."""
        for entry in self.entries:
            yield entry.name, entry.tensor, entry.pieces

    def names(self, name: str) -> bool:
        """Whether the table has a Hugging Face name."""
        return any(pattern.match(name) for pattern in self._named)

    def _table(self) -> dict[str, Kind]:
        table = dict(self.family.rules)
        if self.has_value_head:
            table[_OUTPUT] = Replicated(f"{HEAD_NAME}.weight", may_be_absent=True)
            table["output_layer.bias"] = Replicated(f"{HEAD_NAME}.bias", may_be_absent=True)
        elif self.is_tied:
            table[_OUTPUT] = table[_EMBEDDING]
        return table

    def _entries(self, chunk: nn.Module) -> Iterator[LocalTensor]:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]  # type: ignore[union-attr]
        buffers = dict(chunk.named_buffers())
        for name in chunk.state_dict(keep_vars=True):
            tensor = buffers.get(name)
            if tensor is None:
                try:
                    tensor = chunk.get_parameter(name)
                except AttributeError:
                    continue  # extra state of a module (Transformer Engine's)
            yield self._entry(chunk, name, tensor, numbers)

    def _entry(self, chunk: nn.Module, name: str, tensor: torch.Tensor, numbers: Sequence[int]) -> LocalTensor:
        of_whole = _LAYER.sub(lambda match: str(numbers[int(match.group())]), local_layers_name(name))
        first = self.ranks.expert * int(self._model_kwargs.get("num_moe_experts") or 0) // self.ranks.experts
        of_whole, of_expert = _EXPERT.subn(lambda match: str(first + int(match.group())), of_whole)
        matches = ((match, kind) for pattern, kind in self._rules if (match := pattern.match(of_whole)) is not None)
        matched, kind = next(matches, (None, None))
        if matched is None or kind is None:
            raise ModelError(
                f"{type(self.family).__name__}: there is no rule for Megatron's parameter {of_whole}; add one to the "
                "family's rules (docs/megatron_models.md)"
            )
        rank, ranks = self.ranks.tensor, self.ranks.tensors
        if of_expert:
            rank, ranks = self.ranks.expert_tensor, self.ranks.expert_tensors
        is_cut = ranks > 1 and bool(getattr(tensor, "tensor_model_parallel", False))
        local = Local(of_whole, tuple(tensor.shape), rank, ranks, is_cut, self._model_kwargs)
        pieces = tuple(kind.pieces(kind.named(matched.groupdict()), local))
        covered = sum(piece.slice.elements for piece in pieces)
        if covered != tensor.numel() and not isinstance(kind, Vocabulary):
            raise ModelError(f"{of_whole}: its rule covers {covered} of its {tensor.numel()} elements")
        return LocalTensor(chunk, name, pieces, bool(of_expert), kind.may_be_absent)
