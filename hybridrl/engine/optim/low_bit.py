"""Optimizers of torchao that keep Adam's moments in 8 bits, on shards and in checkpoints.

The moments are quantised in blocks of neighbours ("8-bit optimizers", arXiv 2110.02861), each with a scale of its own.
Blocks end where rows end, so they are the same on any number of ranks: how the model is sharded changes neither the
result nor what a checkpoint can be resumed on.
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
LEAST = 4096  # elements; smaller parameters keep moments of their own dtype, as in the paper
CODES, SCALE = ".codes", ".scale"
SIGNED = ("exp_avg",)


def block_size(shape: torch.Size) -> int | None:
    """Elements that share a scale in the moments of a parameter; None where it keeps moments of full precision."""
    if len(shape) < 2 or shape.numel() < LEAST:
        return None
    return next((block for block in BLOCKS if shape[-1] % block == 0), None)


def row_blocks(kind: Any) -> Any:
    """The class `kind` of `torchao.optim` with blocks that end with rows.

    Raises:
        ModelError: it is not one of `KINDS`.
    """
    if kind.__name__ not in KINDS:
        raise ModelError(
            f"optim.optimizer={kind.__name__} of torchao.optim has a state that no checkpoint here can hold; use "
            f"{' or '.join(KINDS)}"
        )

    class RowBlocks(kind):
        def step(self, closure: Any = None) -> Any:
            # torchao compiles its step; on a CPU that takes a C++ compiler and half a minute.
            compiled: Any = contextlib.nullcontext()
            with compiled if device.is_gpu() else torch.compiler.set_stance("force_eager"):
                return super().step(closure)

        def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
            return self.new_moment(p, signed)

        def new_moment(self, parameter: torch.Tensor, signed: bool) -> torch.Tensor:
            """A moment of the parameter, all 0: quantised, or of its own dtype where `block_size` says so."""
            block, parameter = block_size(parameter.shape), parameter.detach()
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if block is None or not local.numel():
                return torch.zeros_like(parameter)
            return _like(parameter, self._subclass_zeros(local, signed, block)).to(parameter.device)

    RowBlocks.__name__ = RowBlocks.__qualname__ = kind.__name__
    return RowBlocks


def keeps(optimizer: Any) -> TypeGuard[Any]:
    """Whether the optimizer is one of `row_blocks`."""
    return hasattr(optimizer, "new_moment")


def _like(parameter: torch.Tensor, local: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
    """A tensor of `shape` (the parameter's where None), sharded as the parameter is; `local` is this rank's shard."""
    if not isinstance(parameter, DTensor):
        return local
    shape = shape or parameter.shape
    stride = tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def stored_parts(parameter: torch.Tensor, name: str, moment: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A moment as plain tensors that share its memory: `<name>.codes` uint8 of the parameter's shape and `<name>.scale`
    float32 [..., blocks of a row], or the moment itself where it is not quantised."""
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
