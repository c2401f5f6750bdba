"""Optimizers of torchao that keep Adam's moments in 8 bits, on shards and in checkpoints.

The moments are quantised in blocks of neighbouring elements ("8-bit optimizers", arXiv 2110.02861), each with its own
scale. Blocks end where rows end, so they do not depend on the number of ranks. Sharding therefore changes neither the
result nor where a checkpoint can be resumed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from hybridrl.engine.saved_slices import SavedSlice
from hybridrl.errors import ModelError
from hybridrl.layouts.slices import TensorSlice

KINDS = ("AdamW8bit", "Adam8bit")
BLOCKS = (256, 128, 64)
CODE_VALUES = 256  # float32: what each code of a moment stands for
LEAST = 4096  # elements; smaller parameters keep moments in their own dtype, as in the paper
CODES, SCALE = ".codes", ".scale"
SIGNED = ("exp_avg",)


def block_size(shape: torch.Size) -> int | None:
    """Elements that share a scale in the moments of a parameter; None if its moments have full precision."""
    if len(shape) < 2 or shape.numel() < LEAST:
        return None
    return next((block for block in BLOCKS if shape[-1] % block == 0), None)


def moment_bytes(parameter: torch.Tensor) -> int:
    """Bytes of a moment of the parameter, or of this rank's part of it."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    block = block_size(parameter.shape)
    if block is None or not local.numel():
        return local.nbytes
    return local.numel() + 4 * (local.numel() // block + CODE_VALUES)


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
            # With a GPU, too, parameters may be in main memory (`offload_policy`).
            on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
            with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
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


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor of the parameter's shape, sharded like it; `local` is this rank's shard.

    It is on the device of the parameter's mesh: `DTensor.from_local` copies a shard that is on another one.
    """
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def stored_parts(name: str, moment: torch.Tensor, shard_slice: TensorSlice) -> Iterator[SavedSlice]:
    """Yield this rank's part of a moment, as plain tensors that share its memory.

    These are `<name>.codes`, uint8 in the shape of the parameter, and `<name>.scale`, float32 [..., blocks per row]. A
    moment that is not quantised is yielded itself.

    Args:
        shard_slice: the elements of the parameter that are on this rank.
    """
    if not shard_slice.elements:
        return
    local: Any = moment.to_local() if isinstance(moment, DTensor) else moment
    shape, block = tuple(moment.shape), block_size(moment.shape)
    if block is None:
        yield SavedSlice(name, shape, shard_slice, local)
        return
    yield SavedSlice(name + CODES, shape, shard_slice, local.codes)
    blocks = shape[-1] // block
    tensor_slice = TensorSlice((*shard_slice.start[:-1], 0), (*shard_slice.stop[:-1], blocks))
    yield SavedSlice(name + SCALE, (*shape[:-1], blocks), tensor_slice, local.scale.view(tensor_slice.extents))
