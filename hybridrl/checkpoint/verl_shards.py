"""Reads the weights of checkpoints that verl's FSDP workers wrote.

Each rank of W wrote its shards as a state dict of DTensors, `model_world_size_<W>_rank_<R>.pt`; configuration and
tokenizer are in `huggingface/` next to them. Files are read without running code that they may hold.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from hybridrl.engine.saved_slices import ScatteredSlices
from hybridrl.errors import CheckpointError
from hybridrl.layouts.slices import TensorSlice, whole

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


def is_verl_checkpoint(folder: Path) -> bool:
    """Whether verl's FSDP workers wrote the weights in a folder."""
    return folder.is_dir() and any(_FILE.fullmatch(path.name) for path in folder.iterdir())


class VerlShards(ScatteredSlices):
    """The weights of a model in a folder such as `global_step_10/actor`.

    Raises:
        CheckpointError: a rank's file is missing or cannot be read, or shards are of a kind that is not supported.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        for rank, path in enumerate(_files(folder)):
            try:
                state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except Exception as error:  # torch raises anything for a broken file
                raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
            for name, tensor in state.items():
                if ".lora_" in name or name.startswith("base_model."):
                    raise CheckpointError(
                        f"{path} has {name}: LoRA is not supported; merge its adapter into the model with verl first"
                    )
                if not isinstance(tensor, DTensor):
                    self._add(name, tuple(tensor.shape), whole(tuple(tensor.shape)), _Tensors(state), name)
                    continue
                tensor_slice, shape = _checked_slice(tensor, rank, f"{name} in {path}"), tuple(tensor.shape)
                if tensor_slice.elements or not shape:
                    self._add(name, shape, tensor_slice, _Tensors(state), name)


class _Tensors:
    """A state dict with the methods of a safetensors file."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def get_tensor(self, key: str) -> torch.Tensor:
        tensor = self._state[key]
        local: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        return local

    get_slice = get_tensor


def _files(folder: Path) -> list[Path]:
    """The files of all ranks, in order."""
    by_rank = {int(m[2]): (int(m[1]), path) for path in folder.iterdir() if (m := _FILE.fullmatch(path.name))}
    sizes = sorted({size for size, _ in by_rank.values()})
    if len(sizes) > 1:
        raise CheckpointError(f"{folder} has shards of runs on {sizes} ranks; keep the files of one of them")
    missing = [f"model_world_size_{sizes[0]}_rank_{rank}.pt" for rank in range(sizes[0]) if rank not in by_rank]
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}: copy the files of every rank")
    return [path for _, (_, path) in sorted(by_rank.items())]


def _checked_slice(tensor: DTensor, rank: int, where: str) -> TensorSlice:
    """`_slice`, or a `CheckpointError` for a tensor that this version of torch reads but does not understand."""
    try:
        return _slice(tensor, rank, where)
    except CheckpointError:
        raise
    except Exception as error:  # attributes of torch's classes differ between its versions
        raise CheckpointError(
            f"{where}: torch {torch.__version__} cannot tell which elements a rank holds of it "
            f"({type(error).__name__}: {error}); merge these shards with verl's model_merger and the torch of their run"
        ) from error


def _mesh(tensor: DTensor) -> torch.Tensor:
    """The ranks of a tensor's mesh. Before torch 2.9 a mesh kept them as an attribute; now a property computes them."""
    stored = vars(tensor.device_mesh).get("mesh")
    return tensor.device_mesh.mesh if stored is None else stored


def _slice(tensor: DTensor, rank: int, where: str) -> TensorSlice:
    """The elements of a tensor that a rank holds, each dimension cut as `torch.chunk` does."""
    mesh = _mesh(tensor)
    at = (mesh == rank).nonzero().tolist()
    if len(at) != 1:
        raise CheckpointError(f"{where}: rank {rank} is not in the mesh {mesh.tolist()}")
    start, stop = [0] * tensor.ndim, list(tensor.shape)
    for index, parts, placement in zip(at[0], mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:
            raise CheckpointError(f"{where} has the placements {tensor.placements}; supported are Shard and Replicate")
        dim = placement.dim % tensor.ndim
        size = -(-(stop[dim] - start[dim]) // parts)
        begin = start[dim]
        start[dim], stop[dim] = (min(begin + n * size, stop[dim]) for n in (index, index + 1))
    tensor_slice = TensorSlice(tuple(start), tuple(stop))
    if tuple(tensor._local_tensor.shape) != tensor_slice.extents:
        raise CheckpointError(
            f"{where}: a shard of shape {list(tensor._local_tensor.shape)} should have {list(tensor_slice.extents)}"
        )
    return tensor_slice
