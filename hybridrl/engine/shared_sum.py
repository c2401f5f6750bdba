"""A sum over ranks with the gradient that a shared loss needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class SharedSum(torch.autograd.Function):
    """The sum over a group whose ranks all compute the same from it; each rank's gradient is that of its own part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
