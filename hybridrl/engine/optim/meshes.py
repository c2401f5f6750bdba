"""Parameters by the mesh that holds their shards: operations on several tensors take those of one mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by their mesh, in the order of their first tensors; tensors that are no shards are one group."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def total_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients, over the ranks of all meshes."""
    norms = [_whole(torch.nn.utils.get_total_norm(group)) for group in by_mesh(gradients)]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
