"""The memory that operations take, counted on tensors without values: live bytes, chunks of logits, attention."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridrl.algorithms import functional, linear_statistics

# The kernels for GPUs need no working buffers: a tile is in the logits' dtype alone, a fifth of what PyTorch's
# operations hold of it, and whole logits are read where they are.
_COPIES, _KERNEL_ELEMENTS = 5, 1 << 23


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations within it allocate, and of those that are still in use.

    It counts tensors on the meta device, too, which take no memory.

    Attributes:
        live: bytes in use.
        peak: the most that were in use at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Do not count these, which existed before."""
        for tensor in tensors:
            self._storages[tensor.untyped_storage()] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._count(result.untyped_storage())
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage in self._storages:
            return
        self._storages[storage] = None
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, size).atexit = False

    def _free(self, size: int) -> None:
        self.live -= size


def peak_of(compute: Callable[[], Any], *existing: torch.Tensor) -> int:
    """The most bytes that are in use while `compute` runs, besides those of the `existing` tensors."""
    live_bytes = LiveBytes()
    live_bytes.ignore(*existing)
    with live_bytes:
        compute()
    return live_bytes.peak


def layer_rows(kind: str, triton: bool, vocabulary: int, most: int | None = None) -> int:
    """Tokens that pass through an output layer at a time, counted by what PyTorch's operations would hold of them.

    Args:
        kind: of the device, `cuda` or `cpu`.
        triton: whether it runs the kernels for GPUs.
        vocabulary: words that the layer has.
        most: the settings' limit; see `EngineConfig.most_tokens`.
    """
    rows = linear_statistics.rows_at_a_time(kind, vocabulary, most)
    return max(1, rows // _COPIES) if triton else rows


def logits_rows(kind: str, triton: bool, rows: int, vocabulary: int, most: int | None = None) -> int:
    """Rows of logits `[rows, vocabulary]` that statistics are computed of at a time; see `layer_rows`."""
    chunk_rows = functional.rows_at_a_time(kind, rows, vocabulary, most)
    return max(1, min(chunk_rows, _KERNEL_ELEMENTS // vocabulary)) if triton else chunk_rows


def _allocate(query: torch.Tensor, key: torch.Tensor, head_value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates what a fused attention kernel allocates: its output, and the logarithms of its sums."""
    out = query.new_empty((*query.shape[:-1], head_value.shape[-1]))
    return out, torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


#: Attention of `query, key, head_value` `[..., D]` on the meta device, whose memory is that of the fused kernels: no
#: scores, and no mask. It is one operation, as those are: selective checkpointing keeps its results.
fused_attention: Any = torch.library.custom_op("hybridrl::forecast_attention", _allocate, mutates_args=())
fused_attention.register_fake(_allocate)
fused_attention.register_autograd(_backward, setup_context=_keep)
