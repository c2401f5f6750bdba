"""Attention within the sequences of a packed row on a GPU, by the fastest kernel that is there.

PyTorch brings flash attention 2. The package flash-attn-4 is about twice as fast on a GPU of the Hopper generation. It
is compiled when it is first used, so it installs without a compiler. It is in beta: 4.0.0b36 computed wrong gradients
for heads of 80 on an H200. For each shape of heads its results are therefore compared once with plain attention.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridrl.errors import is_out_of_memory
from hybridrl.notify import notify
from hybridrl.utils import device

PACKAGE = "flash-attn-4"
#: largest error of a kernel in bfloat16 against plain attention in float32, relative to the norm of what is compared
_TOLERANCE = 0.02
#: sizes of heads of queries, keys and values that the package computes, by the first number of the compute capability
_SIZES: dict[int, Callable[[int], bool]] = {
    9: lambda size: size <= 256,
    10: lambda size: size <= 128 or size == 256,
    11: lambda size: size <= 128 or size == 256,
}


class Heads(NamedTuple):
    """Attention heads that a kernel is compiled for.

    Attributes:
        size: of a head.
        of_queries: number of heads of queries; `of_keys` divides it.
        of_keys: number of heads of keys and of values.
        windowed: whether tokens attend to a window.
        gradient: whether gradients are needed.
    """

    size: int
    of_queries: int
    of_keys: int
    dtype: torch.dtype = torch.bfloat16
    windowed: bool = False
    gradient: bool = True


class PackedRows(NamedTuple):
    """Which tokens of a packed row attend to which.

    Attributes:
        boundaries: int32, where each sequence begins, and L.
        longest: length of the longest sequence.
        window: how many tokens one attends to, itself included; 0 for all before it.
        key_boundaries: where the keys of each sequence begin, if there are more keys than queries; the last query sees
            the last key.
        longest_keys: the most keys of a sequence, with `key_boundaries`.
    """

    boundaries: Tensor
    longest: int
    window: int = 0
    key_boundaries: Tensor | None = None
    longest_keys: int | None = None


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float) -> Tensor:
    """Causal attention within each sequence of a packed row, `[L, H, D]`, in half precision.

    Args:
        query: `[L, H, D]`, where D is a multiple of 8; key and value are `[L, G, D]`, where G divides H.
        scale: factor of the scores.
    """
    attend = _by_fitting if has_package() else by_pytorch
    return attend(query, key, value, rows, scale)


@torch.compiler.disable
def _by_fitting(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float) -> Tensor:
    gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    heads = Heads(query.shape[2], query.shape[1], key.shape[1], query.dtype, rows.window > 0, gradient)
    attend = by_package if package_works(heads, torch.are_deterministic_algorithms_enabled()) else by_pytorch
    return attend(query, key, value, rows, scale)


def by_package(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float) -> Tensor:
    """See `varlen_attention`; by the package flash-attn-4."""
    attend = package_function()
    assert attend is not None
    result = attend(
        query,
        key,
        value,
        cu_seqlens_q=rows.boundaries,
        cu_seqlens_k=rows.boundaries if rows.key_boundaries is None else rows.key_boundaries,
        max_seqlen_q=rows.longest,
        max_seqlen_k=rows.longest_keys or rows.longest,
        softmax_scale=scale,
        causal=True,
        window_size=(rows.window - 1, 0) if rows.window else (None, None),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def by_pytorch(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float) -> Tensor:
    """See `varlen_attention`; by the flash attention that is part of PyTorch."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": (rows.window - 1 if rows.window else -1, 0)}
    if query.shape[1] != key.shape[1]:
        if _pytorch_groups_heads():
            options["enable_gqa"] = True
        else:  # PyTorch before 2.13
            key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    of_keys = rows.boundaries if rows.key_boundaries is None else rows.key_boundaries
    longest_keys = rows.longest_keys or rows.longest
    out = varlen_attn(query, key, value, rows.boundaries, of_keys, rows.longest, longest_keys, **options)
    assert isinstance(out, Tensor)  # without the sums of the scores, which were not asked for
    return out


@torch.compiler.assume_constant_result
@functools.cache
def _pytorch_groups_heads() -> bool:
    """Whether PyTorch's kernel takes fewer heads of keys than of queries."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@torch.compiler.assume_constant_result
def has_package() -> bool:
    """Whether flash-attn-4 is installed, can be imported, and is made for this process's GPU."""
    return package_function() is not None


@functools.cache
def package_function() -> Callable[..., Any] | None:
    """Return flash-attn-4's attention function; None where it cannot be used. A failing package is reported once."""
    if device.compute_capability()[0] not in _SIZES:
        return None
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    try:
        function: Callable[..., Any] = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    except Exception as error:
        _warn(f"it cannot be imported ({type(error).__name__}: {_first_line(error)})")
        return None
    return function


@functools.cache
def package_works(heads: Heads, deterministic: bool) -> bool:
    """Whether flash-attn-4 computes what plain attention does, with heads like these; tried once in each process.

    Args:
        deterministic: whether PyTorch has to compute with deterministic algorithms, as it does now.
    """
    if not _SIZES[device.compute_capability()[0]](heads.size):
        return False
    try:
        error = _error_of_package(heads)
    except Exception as failure:
        if is_out_of_memory(failure):
            raise
        _warn(f"heads of size {heads.size} fail ({type(failure).__name__}: {_first_line(failure)})")
        return False
    if not error < _TOLERANCE:
        _warn(f"with heads of size {heads.size} its results are {error:.2g} away from those of plain attention")
        return False
    return True


def _error_of_package(heads: Heads) -> float:
    """The largest relative error of the output and the gradients, for sequences with and without earlier keys.

    It is compared with plain attention on the CPU, in float32.
    """
    queries, keys, window = (70, 200, 33), (70, 330, 160), 40 if heads.windowed else 0
    generator = torch.Generator().manual_seed(0)
    *inputs, upstream = (
        torch.randn(sum(lengths), count, heads.size, generator=generator).to(heads.dtype)
        for lengths, count in zip(
            (queries, keys, keys, queries),
            (heads.of_queries, heads.of_keys, heads.of_keys, heads.of_queries),
            strict=True,
        )
    )

    def computed(attend: Callable[..., Tensor], where: torch.device, dtype: torch.dtype) -> list[Tensor]:
        own = [tensor.to(where, dtype, copy=True).requires_grad_(heads.gradient) for tensor in inputs]
        of_queries, of_keys = (row_boundaries(lengths).to(where) for lengths in (queries, keys))
        rows = PackedRows(of_queries, max(queries), window, of_keys, max(keys))
        with torch.enable_grad():
            out = attend(*own, rows, heads.size**-0.5)
        gradients = torch.autograd.grad(out, own, upstream.to(where, dtype)) if heads.gradient else ()
        return [tensor.detach().float().cpu() for tensor in (out, *gradients)]

    results = computed(by_package, device.current_device(), heads.dtype)
    exact = computed(one_by_one, torch.device("cpu"), torch.float32)
    errors = [(result - expected).norm() / expected.norm() for result, expected in zip(results, exact, strict=True)]
    return float(torch.stack(errors).max())  # NaN if one of them is


def one_by_one(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float) -> Tensor:
    """See `varlen_attention`; one sequence after the other, in any dtype, on any device. Boundaries are read here."""
    starts = rows.boundaries.tolist()
    of_keys = starts if rows.key_boundaries is None else rows.key_boundaries.tolist()
    outs = []
    for (start, end), (first, last) in zip(itertools.pairwise(starts), itertools.pairwise(of_keys), strict=True):
        count, before = end - start, last - first - (end - start)
        mask = None
        if before or 0 < rows.window < count:
            mask = query.new_ones(count, before + count, dtype=torch.bool).tril(before)
            mask = mask.triu(before + 1 - rows.window) if rows.window else mask
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query[start:end], key[first:last], value[first:last]))
        out = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def row_boundaries(lengths: Iterable[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def _warn(reason: str) -> None:
    notify(f"the package {PACKAGE} is installed and not used: {reason}; attention is computed by PyTorch", "warning")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
