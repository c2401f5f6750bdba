"""An FSDP2 engine's share of a checkpoint (`saved_parts`), readable on any number of ranks and by other engines.

A module that keeps several tensors of its checkpoints in one (all experts of a layer) is cut into these. Moments of 8
bits belong to rows of the module's own parameters and are saved under their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybridrl.engine import saved_parts
from hybridrl.engine.fsdp import adapted
from hybridrl.engine.fsdp.state import FSDPState
from hybridrl.engine.loss_scale import LossScale
from hybridrl.engine.optim import low_bit
from hybridrl.engine.saved_parts import SEPARATOR, HFModel
from hybridrl.engine.saved_slices import SavedSlice, SavedSlices
from hybridrl.errors import ModelError
from hybridrl.layouts.module_slices import ModuleSlice
from hybridrl.layouts.slices import TensorSlice, whole
from hybridrl.models import loading, lora, value
from hybridrl.models.kinds import KINDS
from hybridrl.utils import device, distributed


def parts(state: FSDPState, model: HFModel, seed: int, loss_scale: LossScale | None = None) -> saved_parts.Parts:
    """Return the parts of an engine's checkpoints.

    Args:
        state: what is saved and loaded.
        model: whose state it is.
        seed: that new random states are made from.
        loss_scale: of float16 training.
    """
    state.offload.wait_for_state()
    adapter, settings = state.adapter, model.settings
    return saved_parts.Parts(
        weights=partial(_weights, state),
        load_weights=partial(_load_weights, state),
        optimizer=None if state.optimizer is None else partial(_optimizer_state, state),
        load_optimizer=partial(_load_optimizer, state),
        schedule=state.schedule,
        seed=seed,
        loss_scale=loss_scale,
        hf_writer=partial(_hf_writer, state, model),
        notes={} if adapter is None else adapted.notes(adapter, settings, state.compute_dtype),
        check_notes=None if adapter is None else partial(adapted.check_saved, adapter, settings),
    )


def _own_slices(tensors: Mapping[str, torch.Tensor]) -> dict[str, ModuleSlice]:
    """Tensors as they are, under their own names."""
    return {name: ModuleSlice(name, whole(tuple(t.shape)), tuple(t.shape)) for name, t in tensors.items()}


def _slices_to_write(state: FSDPState) -> Mapping[str, ModuleSlice]:
    try:
        return state.exported.module_slices()
    except ModelError:  # a conversion that computes; what is saved has the names of the module
        return _own_slices(state.exported.own())


def _slices_to_read(state: FSDPState, names: Iterable[str]) -> Mapping[str, ModuleSlice]:
    """The slices by which a checkpoint was written: earlier versions used the names of the module."""
    own = _own_slices(state.exported.own())
    return own if set(names) <= own.keys() else state.exported.module_slices()


def _weights(state: FSDPState) -> Iterator[SavedSlice]:
    if state.copy_of_model == 0:
        yield from (part for _, part in state.shards(state.exported.own(), _slices_to_write(state)))


def _optimizer_state(state: FSDPState) -> Iterator[SavedSlice]:
    assert state.optimizer is not None
    if state.copy_of_model != 0:
        return
    if low_bit.keeps(state.optimizer):
        yield from _quantised_state(state)
        return
    module_slices = _slices_to_write(state)
    names: dict[str, list[str]] = {}
    for name, module_slice in module_slices.items():
        names.setdefault(module_slice.source, []).append(name)
    for name, parameter in state.trainable.items():
        for key, item in sorted(state.optimizer.state.get(parameter, {}).items()):
            value = item if isinstance(item, torch.Tensor) else torch.tensor(item)
            if value.ndim:
                for _, part in state.shards(
                    {name: value}, {saved_name: module_slices[saved_name] for saved_name in names[name]}
                ):
                    yield replace(part, name=f"{part.name}{SEPARATOR}{key}")
            elif distributed.get_rank() == 0:
                for saved_name in names[name]:
                    yield SavedSlice(f"{saved_name}{SEPARATOR}{key}", (), TensorSlice((), ()), value)


def _quantised_state(state: FSDPState) -> Iterator[SavedSlice]:
    """The state of an optimizer with moments of 8 bits, under names of the module."""
    assert state.optimizer is not None
    for name, parameter in state.trainable.items():
        shard_slice, _ = state.shard(parameter)
        for key, item in sorted(state.optimizer.state.get(parameter, {}).items()):
            value = item if isinstance(item, torch.Tensor) else torch.tensor(item)
            full_name = f"{name}{SEPARATOR}{key}"
            if value.ndim:
                yield from low_bit.stored_parts(full_name, value, shard_slice)
            elif distributed.get_rank() == 0:
                yield SavedSlice(full_name, (), TensorSlice((), ()), value)


def _load_weights(state: FSDPState, saved: SavedSlices) -> None:
    module_slices = _slices_to_read(state, saved.names)
    of_buffers = {
        name for name, module_slice in module_slices.items() if module_slice.source not in state.exported.parameters
    }
    saved_parts.check_same_model(
        {name: module_slice.shape for name, module_slice in module_slices.items()}, saved, of_buffers
    )
    stored = frozenset(saved.names)
    for _, part in state.shards(state.exported.own(), module_slices):
        if part.name in stored:
            _read(part, saved)


def _read(part: SavedSlice, saved: SavedSlices) -> None:
    part.values.copy_(saved.read(part.name, part.slice))


def _load_optimizer(state: FSDPState, saved: SavedSlices) -> None:
    assert state.optimizer is not None
    keys: dict[str, list[str]] = {}
    for full_name in sorted(saved.names):
        name, _, key = full_name.rpartition(SEPARATOR)
        keys.setdefault(name, []).append(key)
    is_low_bit = low_bit.keeps(state.optimizer)
    module_slices = _own_slices(state.trainable) if is_low_bit else _slices_to_read(state, keys)
    sources = {
        name: module_slice.source
        for name, module_slice in module_slices.items()
        if module_slice.source in state.trainable
    }
    if surplus := sorted(keys.keys() - sources.keys()):
        raise ModelError(
            f"checkpoint {saved.where} belongs to another model: it has optimizer state for {surplus[0]!r}, which this "
            "model does not train"
        )
    # Not where the parameters are: those may be in main memory between updates while the state stays on the device.
    where = torch.device("cpu") if state.keeps_optimizer_in_main_memory else device.current_device()
    state.optimizer.state.clear()
    if is_low_bit:
        _load_quantised(state, saved, keys, where)
        return
    of_source: dict[str, dict[str, ModuleSlice]] = {}
    for name, source in sources.items():
        of_source.setdefault(source, {})[name] = module_slices[name]
    for source, own in of_source.items():
        parameter, first = state.trainable[source], next(iter(own))
        for key in keys.get(first, ()):
            full_name = f"{first}{SEPARATOR}{key}"
            if key.endswith((low_bit.CODES, low_bit.SCALE)):
                raise ModelError(
                    f"checkpoint {saved.where} has {full_name} of an optimizer with moments of 8 bits: set "
                    "optim.optimizer to that of the run, or leave optimizer out of checkpoint.load_contents"
                )
            if not saved.shape(full_name) and parameter.ndim:
                state.optimizer.state[parameter][key] = _scalar(state, saved, full_name, where)
                continue
            value = torch.empty_like(parameter.detach(), dtype=saved.dtype(full_name), device=where)
            state.optimizer.state[parameter][key] = value
            for _, part in state.shards({source: value}, own):
                _read(replace(part, name=f"{part.name}{SEPARATOR}{key}"), saved)


def _load_quantised(
    state: FSDPState, saved: SavedSlices, keys: Mapping[str, Sequence[str]], where: torch.device
) -> None:
    optimizer: Any = state.optimizer
    for name, state_keys in keys.items():
        parameter = state.trainable[name]
        shard_slice, _ = state.shard(parameter)
        for key in state_keys:
            full_name = f"{name}{SEPARATOR}{key}"
            if not saved.shape(full_name):
                optimizer.state[parameter][key] = _scalar(state, saved, full_name, where)
            elif not key.endswith(low_bit.SCALE):  # read together with its codes
                key = key.removesuffix(low_bit.CODES)
                moment = optimizer.new_moment(parameter, signed=key in low_bit.SIGNED, where=where)
                optimizer.state[parameter][key] = moment
                for part in low_bit.stored_parts(f"{name}{SEPARATOR}{key}", moment, shard_slice):
                    _read(part, saved)


def _scalar(state: FSDPState, saved: SavedSlices, name: str, where: torch.device) -> torch.Tensor:
    assert state.optimizer is not None
    on_device = any(group.get("fused") or group.get("capturable") for group in state.optimizer.param_groups)
    value = torch.empty((), dtype=saved.dtype(name), device=where if on_device else torch.device("cpu"))
    _read(SavedSlice(name, (), TensorSlice((), ()), value), saved)
    return value


def _hf_writer(state: FSDPState, model: HFModel, copy: bool) -> Callable[[Path], None] | None:
    """Gather the weights on rank 0, and return what writes them as Hugging Face does. All ranks call it together.

    They have the dtype of the checkpoint that training started from. An adapter is merged into them, and is written by
    itself into a folder of theirs.

    Args:
        state, model: whose weights they are.
        copy: rank 0 has copies and writes them without the other ranks.
    """
    dtype = getattr(model.config, "dtype", None)
    dtype = dtype if isinstance(dtype, torch.dtype) else None
    tensors = _on_rank_zero(state.exported.whole_tensors(dtype), copy)

    adapter = {} if state.adapter is None else _on_rank_zero(state.exported.adapter_tensors(), copy)

    def write(folder: Path) -> None:
        _write_hf(model, folder, tensors)
        if state.adapter is not None:
            lora.save(folder / lora.FOLDER, state.adapter.config, adapter)

    if copy:
        return write if distributed.get_rank() == 0 else None
    return lambda folder: distributed.on_rank_0(lambda: write(folder))


def _on_rank_zero(tensors: Iterator[tuple[str, torch.Tensor]], copy: bool) -> dict[str, torch.Tensor]:
    """Whole tensors in main memory of rank 0; all ranks iterate together."""
    state = {}
    for name, tensor in tensors:
        if distributed.get_rank() == 0:
            on_host = tensor.cpu().contiguous()
            state[name] = on_host.clone() if copy and on_host.data_ptr() == tensor.data_ptr() else on_host
    return state


def _write_hf(model: HFModel, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not KINDS[model.model_type].predicts_tokens:
        value.save_value_model(tensors, model.config, folder)
    else:
        loading.save_language_model(tensors, model.config, folder, model.settings.trust_remote_code)
    saved_parts.save_tokenizer(model.settings, folder)
