"""Stands in for `sgl_kernel`, which is built for GPUs, where SGLang runs on a CPU without it.

SGLang's pure-torch paths import its names at load time and call one of them. The others raise when they are called.

Where it records the experts of tokens, SGLang also registers the memory of the records with CUDA, so that copies from a
GPU are fast. Every process of SGLang imports this module, which lets it go on without.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.0.0+hybridrl.cpu"


class _NoCudaRuntime:
    """Stands in for what `torch.cuda.cudart` returns."""

    @staticmethod
    def cudaHostRegister(pointer: int, size: int, flags: int) -> int:
        """Register nothing; 0 means success."""
        return 0


if not torch.cuda.is_available():
    torch.cuda.cudart = _NoCudaRuntime


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    locations: torch.Tensor,
    width: int,
) -> None:
    """Write where each request's new tokens are cached: `table[request, start:end]`, from `locations` in order.

    Args:
        requests: [B] rows of the table.
        table: [rows, width] cache location of each token of each request.
        starts, ends: [B] range of tokens to write.
        locations: [sum of lengths], request after request.
        width: of the table; not needed here.
    """
    lengths = (ends - starts).tolist()
    pieces = locations.split([*lengths, locations.shape[0] - sum(lengths)])
    for row, start, end, piece in zip(requests.tolist(), starts.tolist(), ends.tolist(), pieces, strict=False):
        table[row, start:end] = piece.to(table.dtype)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"this model needs sgl_kernel.{name}, which there is no CPU build of here: use a GPU, or "
            "actor_rollout_ref.rollout.name=vllm or hf"
        )

    return missing
