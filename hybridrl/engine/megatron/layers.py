"""Modules that the engine puts into Megatron-core's layers where Transformer Engine is missing.

Megatron-core's own RMSNorm refuses sequence parallelism, and its own attention knows neither packed sequences nor
context parallelism.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from hybridrl.models.attention import packed_attention
from hybridrl.models.value import ValueHead


class RMSNorm(nn.Module):
    """Root mean square normalisation, also of a part of the sequence; the sum of squares is taken in float32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.zero_centered:
            return rms_norm(hidden.float(), hidden.shape[-1:], 1.0 + self.weight.float(), self.eps).type_as(hidden)
        return rms_norm(hidden, hidden.shape[-1:], self.weight, self.eps)


class ReplicatedLinear(nn.Module):
    """A linear map of each rank's own part of the sequence; its gradient is summed over the parts."""

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return nn.functional.linear(hidden, self.weight), None


class ParallelValueHead(ValueHead):
    """The value head in the place of Megatron-core's output layer. Every tensor-parallel rank computes it."""

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: None = None
    ) -> tuple[torch.Tensor, None]:
        return super().forward(hidden), None


class CausalAttention(nn.Module):
    """Attention of each token to itself and those before it, in the place of Megatron-core's `core_attention`.

    Query is `[S, b, H, D]`, or `[L, H, D]` for sequences packed into one row; key and value have G heads, where G
    divides H. With context parallelism, a rank holds the chunks r and 2 n - 1 - r of the 2 n chunks of each sequence,
    so that all ranks have the same work, and gathers keys and values of the other ranks.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        from megatron.core.transformer.utils import is_layer_window_attention

        self.scale = 1 / math.sqrt(k_channels or config.kv_channels) if softmax_scale is None else softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # Megatron-core counts the tokens to the left of a token, this module the token itself, too.
        self.window = config.window_size[0] + 1 if windowed else 0
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        packed = packed_seq_params is not None
        if self.cp_group.size() == 1:
            if packed:
                boundaries, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
                return packed_attention(query, key, value, boundaries, longest, self.scale, self.window)
            return self._attend(query, key, value, None)
        if packed:
            ends = packed_seq_params.cu_seqlens_q.tolist()
            rows = self._across_ranks(*(tensor.unsqueeze(1) for tensor in (query, key, value)), ends=ends)
            return rows.squeeze(1)
        return self._across_ranks(query, key, value, ends=[0, query.shape[0] * self.cp_group.size()])

    def _across_ranks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, ends: Sequence[int]
    ) -> torch.Tensor:
        """`ends` are the boundaries of the whole sequences; each rank holds an equal part of each."""
        size, rank = self.cp_group.size(), self.cp_group.rank()
        keys, values = (_Gather.apply(tensor, self.cp_group) for tensor in (key, value))
        outs = []
        for start, end in itertools.pairwise(ends):
            own = slice(start // size, end // size)
            whole_key, whole_value = (joined([part[own] for part in parts]) for parts in (keys, values))
            positions = own_positions(end - start, size, rank).to(query.device)
            outs.append(self._attend(query[own], whole_key, whole_value, positions))
        return torch.cat(outs)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """All tensors `[S, b, heads, D]`; `positions` are those of the queries, None if they count from 0."""
        length, mask = key.shape[0], None
        if positions is not None or 0 < self.window < length:
            key_positions = torch.arange(length, device=query.device)
            last = key_positions[:, None] if positions is None else positions[:, None]
            mask = key_positions <= last
            if self.window:
                mask &= key_positions > last - self.window
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        return self._kernel(q, k, v, mask).permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)

    def _kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """All tensors `[b, heads, S, D]`; without a mask, attention is causal."""
        causal = mask is None
        return scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=self.scale, enable_gqa=True)


def own_positions(length: int, size: int, rank: int) -> torch.Tensor:
    """Positions of a sequence that a context-parallel rank holds; `length` is a multiple of 2 `size`."""
    chunk = length // (2 * size)
    chunks = torch.arange(length).view(2 * size, chunk)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole sequence from the parts of all context-parallel ranks, along the first dimension."""
    halves = [part.chunk(2) for part in parts]
    return torch.cat([*(first for first, _ in halves), *(second for _, second in reversed(halves))])


class _Gather(torch.autograd.Function):
    """The tensors of all ranks; the gradient of a rank's own is summed over what all ranks compute from it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        own = torch.empty_like(gradients[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_tensor(own, torch.cat(gradients), group=ctx.group)
        return own, None
