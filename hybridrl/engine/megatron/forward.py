"""Micro-batches as this rank's part of the model reads them, and the outputs that the last stage computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hybridrl.engine.chunked_function import Hidden, chunked_function
from hybridrl.engine.logits_functions import LogitsFunction
from hybridrl.engine.megatron import build
from hybridrl.engine.megatron.layers import own_positions
from hybridrl.engine.megatron.mapping import padded_vocabulary
from hybridrl.engine.megatron.parallel import ParallelSizes, ParallelState
from hybridrl.engine.megatron.vocabulary import (
    STATISTICS,
    VocabularyShard,
    parallel_linear_statistics,
    parallel_statistics,
)
from hybridrl.engine.megatron.whole_vocabulary import SharedVocabulary
from hybridrl.engine.micro_batched import OutputRequest
from hybridrl.engine.microbatch import MicroBatchLayout
from hybridrl.engine.shared_sum import SharedSum
from hybridrl.models import attention
from hybridrl.models.kinds import KINDS
from hybridrl.utils import device

#: functions of logits, each with the hidden states of the engine that it compares a micro-batch with
Compared = Sequence[tuple[LogitsFunction, Hidden | None]]


@dataclass(slots=True)
class RankLayout:
    """One micro-batch on one rank; b rows of W tokens, or one row of packed sequences.

    Attributes:
        input_ids, position_ids: `[b, W / cp]`.
        lengths: of packed sequences, padding included, over all context-parallel ranks; None in the aligned layout.
        selected: positions in the flattened `[b, W / cp]` that predict a response token, of those of this rank.
        labels: the response tokens of all ranks, `[N]`.
        owned: which of the N this rank predicts; None: all.
        inputs: fields of the response tokens of all ranks that a function of logits reads, `[N, ...]`.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: list[int] | None
    selected: torch.Tensor
    labels: torch.Tensor
    owned: torch.Tensor | None
    inputs: Mapping[str, torch.Tensor]

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Select from `[N, ...]` the response tokens that this rank predicts."""
        return tensor if self.owned is None else tensor[self.owned]


@dataclass(frozen=True, slots=True)
class Arranger:
    """Pads micro-batches to what a layout needs, and takes this rank's part of the sequences.

    Attributes:
        sequence_parallel: whether tensor-parallel ranks split the sequence, too.
        packed: whether sequences are packed.
    """

    state: ParallelState
    sequence_parallel: bool
    packed: bool

    @property
    def _row_multiple(self) -> int:
        """Return the number of which the length of a row has to be a multiple, in tokens."""
        sizes = self.state.sizes
        return (2 * sizes.cp if sizes.cp > 1 else 1) * (sizes.tp if self.sequence_parallel else 1)

    def shape(self, layouts: Sequence[MicroBatchLayout]) -> tuple[int, int]:
        """The smallest `(b, W)` that every micro-batch can be padded to."""
        rows = max(layout.input_ids.shape[0] for layout in layouts)
        return rows, max(sum(self._padded_lengths(layout)) for layout in layouts)

    def arrange(self, layout: MicroBatchLayout, shape: tuple[int, int] | None = None) -> RankLayout:
        """This rank's part of a micro-batch.

        Args:
            shape: pad it to this `(b, W)`.

        Raises:
            ValueError: positions do not count the tokens of each sequence.
        """
        _check_positions(layout)
        lengths = self._padded_lengths(layout, None if shape is None else shape[1])
        real = self._real_lengths(layout)
        rows, width = layout.input_ids.shape[0] if shape is None else shape[0], sum(lengths)
        # Where each token goes: the tokens of sequence i begin at column starts[i].
        ids = torch.zeros(rows, width, dtype=torch.int64)
        positions = torch.cat([torch.arange(length) for length in lengths])
        columns = torch.cat(
            [start + torch.arange(length) for start, length in zip(_starts(lengths), real, strict=False)]
        )
        ids[: layout.input_ids.shape[0], columns] = layout.input_ids
        row, column = layout.selected // sum(real), layout.selected % sum(real)
        selected, owned = row * width + columns[column], None
        if self.state.sizes.cp > 1:
            own_columns = self._own_columns(lengths)
            ids, positions = ids[:, own_columns], positions[own_columns]
            place = torch.full((width,), -1)
            place[own_columns] = torch.arange(len(own_columns))
            local = place[columns[column]]
            owned = local >= 0
            selected = (row * len(own_columns) + local)[owned]
        here = device.current_device()
        return RankLayout(
            ids.to(here),
            positions.expand(rows, -1).to(here),
            lengths if self.packed else None,
            selected.to(here),
            layout.labels.to(here),
            None if owned is None else owned.to(here),
            {name: tensor.to(here) for name, tensor in (layout.inputs or {}).items()},
        )

    def _real_lengths(self, layout: MicroBatchLayout) -> list[int]:
        return [layout.input_ids.shape[1]] if layout.lengths is None else layout.lengths

    def _padded_lengths(self, layout: MicroBatchLayout, width: int | None = None) -> list[int]:
        """Return the padded length of each sequence of a row, and of a sequence of padding if the row needs one."""
        sizes, multiple = self.state.sizes, self._row_multiple
        each = 2 * sizes.cp if sizes.cp > 1 else 1
        lengths = [_up(length, each) for length in self._real_lengths(layout)]
        missing = (_up(sum(lengths), multiple) if width is None else width) - sum(lengths)
        if not missing:
            return lengths
        return [*lengths, missing] if self.packed else [sum(lengths) + missing]

    def _own_columns(self, lengths: Sequence[int]) -> torch.Tensor:
        size, rank = self.state.sizes.cp, self.state.cp_rank
        parts = [
            start + own_positions(length, size, rank) for start, length in zip(_starts(lengths), lengths, strict=True)
        ]
        return torch.cat(parts)


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    return starts


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _check_positions(layout: MicroBatchLayout) -> None:
    lengths = layout.lengths or [layout.input_ids.shape[1]]
    expected = torch.cat([torch.arange(length) for length in lengths])
    if layout.attention_mask is not None or not bool((layout.position_ids == expected).all()):
        raise ValueError(
            "position_ids do not count the tokens of each sequence from 0; strategy=megatron computes no other "
            "positions. Leave position_ids out, or use strategy=fsdp2"
        )


def packed_parameters(layout: RankLayout, where: torch.device | None = None) -> Any:
    """Return Megatron-core's `PackedSeqParams`, the boundaries of packed sequences; None for aligned rows.

    Args:
        where: the device of the boundaries; None: that of the tokens.
    """
    if layout.lengths is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *layout.lengths]).cumsum(0).to(where or layout.input_ids.device, torch.int32)
    longest = max(layout.lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def fusing_unsupported_reason(chunk: Any) -> str | None:
    """Return why log-probabilities need whole logits of the model's last chunk; None if they do not."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    head = chunk.output_layer
    if type(head) is not ColumnParallelLinear or "forward" in vars(head) or head.bias is not None:
        return "its output layer is not Megatron-core's linear layer without a bias"
    if head._forward_hooks or chunk._forward_hooks:
        return "it changes its logits after its output layer"
    return None


def packing_unsupported_reason(sizes: ParallelSizes, dtype: torch.dtype, config: PreTrainedConfig) -> str | None:
    """Return why attention on this process's GPU cannot keep the sequences of a packed row apart; None if it can."""
    if build.has_transformer_engine():
        return (
            f"the kernels of Transformer Engine do not compute packed sequences in {dtype}"
            if dtype == torch.float32
            else None
        )
    if sizes.cp > 1:
        return None
    reason = attention.varlen_unsupported_reason(config)
    if reason is None and (dtype == torch.float32 or not device.supports_varlen_attention()):
        return f"the kernel in PyTorch does not compute {dtype} on this GPU"
    return reason


@dataclass(slots=True)
class Outputs:
    """Outputs that the last stage computes from its hidden states.

    Only positions that predict a response token pass through the output layer: a hook of it picks them. With sequence
    parallelism they are gathered before.

    Attributes:
        chunk: the model's last chunk; its output layer gets the hook.
        part: this rank's part of the vocabulary.
        why_whole: why logits cannot be computed by chunks of tokens, from hidden states; None if they can.
        fused: whether statistics of tokens are.
        most_tokens: most tokens whose statistics are computed at a time; None: as many as compute fast on the device.
        chunk_size: tokens at a time in what is computed from logits; None: as many as compute fast on the device.
    """

    chunk: nn.Module
    state: ParallelState
    part: VocabularyShard
    sequence_parallel: bool
    why_whole: str | None
    fused: bool = False
    most_tokens: int | None = None
    chunk_size: int | None = None
    _current: tuple[RankLayout, OutputRequest] | None = field(default=None, init=False)
    _weight: torch.Tensor | None = field(default=None, init=False)
    _head: Any = field(default=None, init=False)

    @classmethod
    def of(
        cls,
        chunk: nn.Module,
        state: ParallelState,
        plan: build.Blueprint,
        sequence_parallel: bool,
        fused: bool,
        most_tokens: int | None,
    ) -> Outputs:
        """The outputs of the last chunk of a model; `fused` has an effect where logits can be computed by chunks."""
        part = VocabularyShard.of(plan.vocabulary, padded_vocabulary(plan.vocabulary, state.sizes.tp), state.tp_group)
        language = KINDS[plan.model_type].predicts_tokens
        reason = fusing_unsupported_reason(chunk) if language else "a value model has no logits"
        return cls(chunk, state, part, sequence_parallel, reason, fused and reason is None, most_tokens)

    def __post_init__(self) -> None:
        head: Any = self.chunk.output_layer
        head.register_forward_pre_hook(self._select)
        if self.sequence_parallel and hasattr(head, "allreduce_dgrad"):  # the value head has no part of a vocabulary
            head.sequence_parallel, head.allreduce_dgrad = False, True
        if self.why_whole is None:
            self._head, head.forward = head.forward, self._forward

    @contextlib.contextmanager
    def selecting(self, layout: RankLayout, request: OutputRequest) -> Iterator[None]:
        """Within the context, the model computes the selected positions only.

        It returns logits `[1, n, V / tp]`, values, or hidden states `[1, n, H]`; `compute` makes outputs of them.
        """
        self._current = layout, request
        try:
            yield
        finally:
            self._current = None

    def _select(self, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        hidden = arguments[0]  # [W, b, H]
        assert self._current is not None
        if self.sequence_parallel:
            # What follows computes the whole gradient on each rank.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        rows = hidden.transpose(0, 1).reshape(-1, hidden.shape[-1])
        return rows.index_select(0, self._current[0].selected)[:, None], *arguments[1:]

    def _reads_hidden(self, request: OutputRequest) -> bool:
        """Whether the outputs are computed from hidden states, and not from logits of all tokens."""
        return self.why_whole is None and (self.fused or not set(request.outputs) <= {*STATISTICS, "values"})

    def _forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """The output layer's forward pass, from hidden states `[n, 1, H]`; `weight` is that of a tied embedding."""
        assert self._current is not None
        if not self._reads_hidden(self._current[1]):
            logits: tuple[torch.Tensor, None] = self._head(hidden, weight, runtime_gather_output)
            return logits
        head: Any = self.chunk.output_layer
        self._weight = head.weight if weight is None else weight
        return hidden, None

    def hidden(self, output: torch.Tensor) -> Hidden:
        """Wrap the hidden states of this rank's tokens that the model returned in place of logits."""
        assert self._weight is not None
        return Hidden(output.reshape(-1, output.shape[-1]), self._weight)

    def compute(
        self, output: torch.Tensor, layout: RankLayout, request: OutputRequest, compared: Compared
    ) -> dict[str, torch.Tensor]:
        """The outputs of all N response tokens, `[N, ...]`; the same on every rank that holds the last stage.

        Args:
            output: what the model returned.
            compared: the functions of logits among the outputs, each with what it compares this micro-batch with.
        """
        names = [name for name in STATISTICS if name in request.outputs]
        labels, temperature = layout.own(layout.labels), request.temperature
        outputs: dict[str, torch.Tensor] = {}
        if "values" in request.outputs:
            outputs["values"] = output.reshape(-1).float()
        elif self._reads_hidden(request):
            hidden = self.hidden(output)
            if names:
                options = temperature, names, self.part, self.chunk_size, self.most_tokens
                outputs = parallel_linear_statistics(hidden.states, hidden.weight, labels, *options)
            for function, other in compared:
                inputs = {name: layout.own(layout.inputs[name]) for name in function.fields}
                outputs |= chunked_function(function, hidden, inputs, temperature, other, SharedVocabulary(self.part))
        else:
            logits = output.reshape(-1, output.shape[-1])
            options = temperature, names, self.part, self.chunk_size, self.most_tokens
            outputs = parallel_statistics(logits, labels, *options)
        if layout.owned is None:
            return outputs
        return {name: self._over_context(own, layout.owned) for name, own in outputs.items()}

    def _over_context(self, own: torch.Tensor, owned: torch.Tensor) -> torch.Tensor:
        """The outputs of all response tokens from those that each context-parallel rank predicts."""
        total = own.new_zeros(len(owned), *own.shape[1:])
        cells = owned.reshape(-1, *(1 for _ in own.shape[1:]))
        joined: torch.Tensor = SharedSum.apply(total.masked_scatter(cells, own), self.state.cp_group)
        return joined
