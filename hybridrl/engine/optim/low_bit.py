"""Optimizers of torchao that keep Adam's moments in 8 bits, on shards and in checkpoints.

The moments are quantised in blocks of neighbouring elements ("8-bit optimizers", arXiv 2110.02861), each with its own
scale. Blocks end where rows end, so they do not depend on the number of ranks. Sharding therefore changes neither the
result nor where a checkpoint can be resumed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from hybridrl.errors import ModelError
from hybridrl.utils import device

KINDS = ("AdamW8bit", "Adam8bit")
BLOCKS = (256, 128, 64)
LEAST = 4096  # elements; smaller parameters keep moments in their own dtype, as in the paper
CODES, SCALE = ".codes", ".scale"
SIGNED = ("exp_avg",)


def block_size(shape: torch.Size) -> int | None:
    """Elements that share a scale in the moments of a parameter; None if its moments have full precision."""
    if len(shape) < 2 or shape.numel() < LEAST:
        return None
    return next((block for block in BLOCKS if shape[-1] % block == 0), None)


def row_blocks(kind: Any) -> Any:
    """The class `kind` of `torchao.optim`, with blocks that end where rows end.

    Raises:
        ModelError: it is not one of `KINDS`.
    """
    if kind.__name__ not in KINDS:
        raise ModelError(
            f"optim.optimizer={kind.__name__} of torchao.optim has a state that checkpoints do not support; use "
            f"{' or '.join(KINDS)}"
        )

    class RowBlocks(kind):
        def step(self, closure: Any = None) -> Any:
            # torchao compiles its step, which on a CPU needs a C++ compiler and half a minute.
            compiled: Any = contextlib.nullcontext()
            with compiled if device.is_gpu() else torch.compiler.set_stance("force_eager"):
                return super().step(closure)

        def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
            return self.new_moment(p, signed)

        def new_moment(self, parameter: torch.Tensor, signed: bool, where: torch.device | None = None) -> torch.Tensor:
            """A moment of the parameter, filled with 0: quantised, or in its own dtype, as `block_size` decides.

            Args:
                where: its device; None: the parameter's.
            """
            block, parameter = block_size(parameter.shape), parameter.detach()
            where = where or parameter.device
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if block is None or not local.numel():
                return torch.zeros_like(parameter, device=where)
            return _like(parameter, self._subclass_zeros(local, signed, block)).to(where)

    RowBlocks.__name__ = RowBlocks.__qualname__ = kind.__name__
    return RowBlocks


def keeps(optimizer: Any) -> TypeGuard[Any]:
    """Whether the optimizer is one of `row_blocks`."""
    return hasattr(optimizer, "new_moment")


def _like(parameter: torch.Tensor, local: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
    """A tensor of `shape` (default: the parameter's), sharded like the parameter; `local` is this rank's shard."""
    if not isinstance(parameter, DTensor):
        return local
    shape = shape or parameter.shape
    stride = tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def stored_parts(parameter: torch.Tensor, name: str, moment: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A moment as plain tensors that share its memory.

    These are `<name>.codes`, uint8 with the parameter's shape, and `<name>.scale`, float32 [..., blocks per row]. A
    moment that is not quantised is yielded itself.
    """
    block, shape = block_size(parameter.shape), parameter.shape
    if block is None:
        yield name, moment
        return
    local: Any = moment.to_local() if isinstance(moment, DTensor) else moment
    blocks = torch.Size([*shape[:-1], shape[-1] // block])
    if local.numel():
        codes, scale = local.codes, local.scale.view(*local.shape[:-1], blocks[-1])
    else:
        codes = torch.empty(local.shape, dtype=torch.uint8)
        scale = torch.empty([*local.shape[:-1], blocks[-1]])
    yield name + CODES, _like(parameter, codes)
    yield name + SCALE, _like(parameter, scale, blocks)
