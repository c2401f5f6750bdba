"""Ulysses sequence parallelism: the ranks of a group share every sequence (arXiv:2309.14509).

Outside of attention, each rank holds a part of the tokens of a packed row. Inside it, each rank holds all tokens and a
part of the attention heads. An all-to-all before attention and one after it convert between the two, so attention
itself is what it is on one rank.

Shapes: L tokens of the row, n ranks, H heads of queries, G heads of keys and values, D the size of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig

from hybridrl.errors import ModelError
from hybridrl.models.rope import length_dependent_types

KEY = "ulysses_sequence_parallel_size"


def check_model(config: PreTrainedConfig, size: int) -> None:
    """Refuse a model whose heads cannot be shared by `size` ranks, or that needs the whole sequence outside attention.

    Raises:
        ModelError: it names the key and the sizes that fit.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ModelError(
            f"{KEY}={size}: a {type(config).__name__} does not say how many attention heads it has "
            "(num_attention_heads), so they cannot be shared; set it to 1"
        )
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if not _fits(heads, kv_heads, size):
        fitting = ", ".join(str(candidate) for candidate in range(1, heads + 1) if _fits(heads, kv_heads, candidate))
        raise ModelError(
            f"{KEY}={size} does not fit the model's {heads} attention heads and {kv_heads} heads of keys and values: "
            "it has to divide the former, and to divide the latter or be a multiple of them; sizes that fit: "
            f"{fitting}"
        )
    if kinds := sorted(length_dependent_types(config)):
        raise ModelError(
            f"{KEY}={size}: rotary frequencies of the type {', '.join(kinds)} depend on the length of the whole "
            f"sequence, of which each rank sees a part; set it to 1, or another rope_type by model.override_config"
        )


def _fits(heads: int, kv_heads: int, size: int) -> bool:
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


@dataclass
class _Exchanges:
    """The number of exchanges that this process has done."""

    count: int = 0


_exchanges = _Exchanges()


@contextlib.contextmanager
def in_every_layer(config: PreTrainedConfig) -> Iterator[None]:
    """Check after the forward pass in the context that the attention of every layer exchanged tokens for heads.

    Raises:
        ModelError: some did not, so they saw a part of the tokens.
    """
    before = _exchanges.count
    yield
    layers, exchanged = config.get_text_config().num_hidden_layers, (_exchanges.count - before) // 2
    if exchanged < layers:
        raise ModelError(
            f"{KEY}: ranks can share the attention of {exchanged} of the {layers} layers of this {config.model_type} "
            "model; in the others each would see a part of the tokens; set it to 1"
        )


def tokens_to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exchange this rank's tokens of all heads for all tokens of its heads.

    Heads of keys and values are repeated if there are fewer of them than ranks.

    Args:
        query: `[L / n, H, D]`.
        key, value: `[L / n, G, D]`; sizes of heads may differ.

    Returns:
        `[L, H / n, D]` and twice `[L, max(G / n, 1), D]`.

    Raises:
        ModelError: the heads cannot be shared.
    """
    ranks, tokens = group.size(), query.shape[0]
    heads, kv_heads = query.shape[1], key.shape[1]
    if not _fits(heads, kv_heads, ranks):
        raise ModelError(
            f"{KEY}={ranks}: a layer has {heads} heads of queries and {kv_heads} of keys, which {ranks} ranks cannot "
            "share; set it to 1"
        )
    if kv_heads < ranks:
        key, value = (tensor.repeat_interleave(ranks // kv_heads, 1) for tensor in (key, value))
    tensors = (query, key, value)
    # Heads r of n of all three next to each other, so that one collective exchanges them.
    parts = [t.reshape(tokens, ranks, -1).transpose(0, 1) for t in tensors]
    gathered = _exchange(torch.cat(parts, -1), group).flatten(0, 1)
    split = gathered.split([part.shape[-1] for part in parts], -1)
    query, key, value = (s.unflatten(-1, (-1, t.shape[-1])) for s, t in zip(split, tensors, strict=True))
    return query, key, value


def heads_to_tokens(out: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Exchange all tokens of this rank's heads, `[L, H / n, D]`, for its tokens of all heads, `[L / n, H, D]`."""
    gathered = _exchange(out.unflatten(0, (group.size(), -1)), group)  # [n, L / n, H / n, D]
    return gathered.transpose(0, 1).flatten(1, 2)


@torch.compiler.disable
def _exchange(parts: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Send part r of `[n, ...]` to rank r of the group, and return the parts that came, in the order of the ranks."""
    _exchanges.count += 1
    exchanged: torch.Tensor = _AllToAll.apply(parts, group)
    return exchanged


class _AllToAll(torch.autograd.Function):
    """Its gradient travels back the same way."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(parts: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
