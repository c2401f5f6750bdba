"""Stands in for `sgl_kernel`, which is built for GPUs, where SGLang runs on a CPU without it.

SGLang's pure-torch paths import its names at load time and call one of them. The others raise when they are called.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.0.0+hybridrl.cpu"


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
