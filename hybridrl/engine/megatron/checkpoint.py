"""A Megatron engine's share of a checkpoint (`saved_parts`), readable in any other layout and by other engines.

A rank's optimizer updates ranges of flattened parameters. A range is a few slices of Hugging Face tensors, so that
nothing needs to be gathered to be written, and a rank of another layout reads just the slices that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from hybridrl.engine import saved_parts
from hybridrl.engine.hf_files import ModelFiles, stored_dtype, write_config
from hybridrl.engine.megatron.mapping import LocalTensor
from hybridrl.engine.megatron.sharded_optimizer import Shard
from hybridrl.engine.megatron.state import MegatronState
from hybridrl.engine.optim.low_bit import CODES, SCALE
from hybridrl.engine.saved_parts import SEPARATOR, HFModel
from hybridrl.engine.saved_slices import SavedSlice, SavedSlices, slices_of_range
from hybridrl.errors import ModelError
from hybridrl.layouts.slices import TensorSlice
from hybridrl.utils import device, distributed


def parts(state: MegatronState, model: HFModel, seed: int) -> saved_parts.Parts:
    """Return the parts of an engine's checkpoints.

    Args:
        state: what is saved and loaded.
        model: whose state it is.
        seed: that new random states are made from.
    """
    return saved_parts.Parts(
        weights=partial(_weights, state),
        load_weights=partial(_load_weights, state),
        optimizer=None if state.optimizer is None else partial(_optimizer_state, state),
        load_optimizer=partial(_load_optimizer, state),
        schedule=None if state.optimizer is None else state.optimizer.schedule,
        seed=seed,
        hf_writer=lambda copy: _hf_copy(state, model) if copy else partial(_write_hf, state, model),
    )


def _write_hf(state: MegatronState, model: HFModel, folder: Path) -> None:
    """Write an engine's model and its tokenizer. All ranks call it together; rank 0 holds some files' worth of tensors.

    Weights have the dtype of the checkpoint that training started from.
    """
    files, failed = ModelFiles(folder), None
    for name, tensor in state.exporter.export(stored_dtype(model.config), state.readable):
        if distributed.get_rank() == 0 and failed is None:
            try:
                files.add(name, tensor)
            except Exception as error:  # the other ranks go on sending
                failed = error

    def finish() -> None:
        if failed is not None:
            raise failed
        _finish_hf(model, files, folder)

    distributed.on_rank_0(finish)


def _hf_copy(state: MegatronState, model: HFModel) -> Callable[[Path], None] | None:
    """Gather the model in the main memory of rank 0, and return what writes it there. All ranks call it together."""
    exported = state.exporter.export(stored_dtype(model.config), state.readable)
    tensors = {name: tensor.cpu() for name, tensor in exported if distributed.get_rank() == 0}

    def write(folder: Path) -> None:
        files = ModelFiles(folder)
        for name, tensor in tensors.items():
            files.add(name, tensor)
        _finish_hf(model, files, folder)

    return write if distributed.get_rank() == 0 else None


def _finish_hf(model: HFModel, files: ModelFiles, folder: Path) -> None:
    files.finish()
    write_config(model.config, model.model_type, files, folder)
    saved_parts.save_tokenizer(model.settings, folder)


def _views(
    entry: LocalTensor, shard: Shard, flat: torch.Tensor
) -> Iterator[tuple[str, tuple[int, ...], TensorSlice, torch.Tensor]]:
    """Split the range of a flattened parameter that a rank updates by the Hugging Face tensors that it belongs to.

    Args:
        entry: the parameter.
        shard: the range.
        flat: values of the range.

    Yields:
        Name and shape of a tensor, a slice of it, and the slice's elements as a view of `flat`.
    """
    for own, at in slices_of_range(tuple(entry.tensor.shape), shard.start, shard.stop):
        values = flat[at : at + own.elements].view(own.extents)
        for piece in entry.pieces:
            piece_slice = TensorSlice.of_extents(piece.at, piece.slice.extents)
            common = own.intersect(piece_slice)
            if common is None:
                continue
            shift = [b - a for a, b in zip(piece.at, piece.slice.start, strict=True)]
            tensor_slice = TensorSlice(
                tuple(a + s for a, s in zip(common.start, shift, strict=True)),
                tuple(b + s for b, s in zip(common.stop, shift, strict=True)),
            )
            yield piece.name, piece.shape, tensor_slice, values[common.within(own)]


def _weights(state: MegatronState) -> Iterator[SavedSlice]:
    """Yield the weights that this rank writes: its ranges of the master weights, and tensors without master weights."""
    state.exporter.shapes()  # all ranks together; some ask for nothing below
    entries = state.entries()
    covered: set[tuple[int, str]] = set()
    for shard in [] if state.optimizer is None else state.optimizer.shards:
        if shard.is_primary:
            flat = state.readable(shard.master.detach())
            for part in _views(entries[shard.chunk, shard.name], shard, flat):
                yield SavedSlice(*part)
    if state.optimizer is not None:
        covered = {key for key, entry in entries.items() if getattr(entry.tensor, "requires_grad", False)}
    for key, entry in entries.items():
        if key in covered:
            continue
        values = state.readable(entry.tensor.detach())
        for piece in entry.pieces:
            if state.exporter.is_first(entry, piece):
                yield SavedSlice(piece.name, piece.shape, piece.slice, piece.of(values))


def _optimizer_state(state: MegatronState) -> Iterator[SavedSlice]:
    assert state.optimizer is not None
    entries = state.entries()
    for shard in state.optimizer.shards:
        if not shard.is_primary:
            continue
        entry = entries[shard.chunk, shard.name]
        for key, item in sorted(state.optimizer.optimizer.state.get(shard.master, {}).items()):
            value = item if isinstance(item, torch.Tensor) else torch.tensor(item)
            if value.ndim:
                for name, shape, tensor_slice, view in _views(entry, shard, state.readable(value.detach())):
                    yield SavedSlice(f"{name}{SEPARATOR}{key}", shape, tensor_slice, view)
            else:
                for name in dict.fromkeys(piece.name for piece in entry.pieces):
                    yield SavedSlice(f"{name}{SEPARATOR}{key}", (), TensorSlice((), ()), value)


def _load_weights(state: MegatronState, saved: SavedSlices) -> None:
    saved_parts.check_same_model(state.exporter.shapes(), saved)  # all ranks together
    entries = state.entries()
    for entry in entries.values():
        values = state.readable(entry.tensor.detach())
        for piece in entry.pieces:
            piece.of(values).copy_(saved.read(piece.name, piece.slice))
    for shard in [] if state.optimizer is None else state.optimizer.shards:
        if shard.master.dtype != shard.parameter.dtype:  # otherwise they are the same memory
            flat = state.readable(shard.master.detach())
            for name, _, tensor_slice, view in _views(entries[shard.chunk, shard.name], shard, flat):
                view.copy_(saved.read(name, tensor_slice))


def _load_optimizer(state: MegatronState, saved: SavedSlices) -> None:
    assert state.optimizer is not None
    optimizer, entries = state.optimizer.optimizer, state.entries()
    keys: dict[str, list[str]] = {}
    for full_name in saved.names:
        name, _, key = full_name.rpartition(SEPARATOR)
        keys.setdefault(name, []).append(key)
    if surplus := sorted(keys.keys() - state.exporter.shapes().keys()):
        raise ModelError(
            f"checkpoint {saved.where} belongs to another model: it has optimizer state for {surplus[0]!r}, which this "
            "model does not have"
        )
    if quantised := next((name for name in saved.names if name.endswith((CODES, SCALE))), None):
        raise ModelError(
            f"checkpoint {saved.where} has {quantised} of an optimizer with moments of 8 bits, which strategy=megatron "
            "cannot continue; resume with strategy=fsdp2 and optim.optimizer of the run, or leave optimizer out of "
            "checkpoint.load_contents"
        )
    where = device.current_device()  # offloaded state leaves it right after: its memory is released, not replaced
    steps_on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    optimizer.state.clear()
    for shard in state.optimizer.shards:
        entry = entries[shard.chunk, shard.name]
        first = next((piece.name for piece in entry.pieces), None)
        for key in keys.get(first or "", ()):
            full_name = f"{first}{SEPARATOR}{key}"
            if not saved.shape(full_name):
                value = saved.read(full_name, TensorSlice((), ()))
                optimizer.state[shard.master][key] = value.to(where) if steps_on_device else value
                continue
            flat = torch.zeros(shard.stop - shard.start, dtype=saved.dtype(full_name), device=where)
            for name, _, tensor_slice, view in _views(entry, shard, flat):
                view.copy_(saved.read(f"{name}{SEPARATOR}{key}", tensor_slice))
            optimizer.state[shard.master][key] = flat
