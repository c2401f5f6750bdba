"""An FSDP2 engine's share of a checkpoint (`saved_parts`), readable on any number of ranks and by other engines.

A module that keeps several tensors of its checkpoints in one (all experts of a layer) is cut into these. Moments of 8
bits belong to rows of the module's own parameters and are saved under their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybridrl.engine import saved_parts
from hybridrl.engine.fsdp import adapted
from hybridrl.engine.optim import low_bit
from hybridrl.engine.saved_boxes import SavedBox, SavedBoxes
from hybridrl.engine.saved_parts import SEPARATOR
from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.shards import Box, whole
from hybridrl.hybrid_engine.views import View, within_shape
from hybridrl.models import loading, lora, value
from hybridrl.models.kinds import KINDS
from hybridrl.utils import device, distributed

if TYPE_CHECKING:
    from hybridrl.engine.fsdp.engine import FSDPEngine


def parts(engine: FSDPEngine) -> saved_parts.Parts:
    """The parts of an engine's checkpoints."""
    engine._offload.wait_for_state()
    return saved_parts.Parts(
        weights=partial(_weights, engine),
        load_weights=partial(_load_weights, engine),
        optimizer=None if engine.optimizer is None else partial(_optimizer_state, engine),
        load_optimizer=partial(_load_optimizer, engine),
        schedule=engine.schedule,
        seed=engine.engine_config.seed,
        hf_writer=partial(_hf_writer, engine),
        notes={} if engine.adapter is None else adapted.notes(engine),
        check_notes=None if engine.adapter is None else partial(adapted.check_saved, engine),
    )


def parts_of(
    engine: FSDPEngine, tensors: Mapping[str, torch.Tensor], views: Mapping[str, View]
) -> Iterator[tuple[str, SavedBox]]:
    """Yield what this rank holds of some of the module's tensors, as views of them, by the names in `views`.

    Yields:
        The name in `tensors`, and the part.
    """
    for name, (source, box, shape) in views.items():
        if source not in tensors:
            continue
        shard_box, tensor = engine._shard(tensors[source])
        both = box.intersect(shard_box)
        if both is not None:
            start, sizes = within_shape(both, box, shape)
            stop = tuple(a + n for a, n in zip(start, sizes, strict=True))
            yield source, SavedBox(name, shape, Box(start, stop), tensor[both.within(shard_box)].view(sizes))


def _own_views(tensors: Mapping[str, torch.Tensor]) -> dict[str, View]:
    """Tensors as they are, under their own names."""
    return {name: View(name, whole(tuple(t.shape)), tuple(t.shape)) for name, t in tensors.items()}


def _views_to_write(engine: FSDPEngine) -> Mapping[str, View]:
    try:
        return engine.exported.views()
    except ModelError:  # a conversion that computes; what is saved has the names of the module
        return _own_views(engine.exported.own())


def _views_to_read(engine: FSDPEngine, names: Iterable[str]) -> Mapping[str, View]:
    """The views by which a checkpoint was written: earlier versions used the names of the module."""
    own = _own_views(engine.exported.own())
    return own if set(names) <= own.keys() else engine.exported.views()


def _weights(engine: FSDPEngine) -> Iterator[SavedBox]:
    if engine.copy_of_model == 0:
        yield from (part for _, part in parts_of(engine, engine.exported.own(), _views_to_write(engine)))


def _optimizer_state(engine: FSDPEngine) -> Iterator[SavedBox]:
    assert engine.optimizer is not None
    if engine.copy_of_model != 0:
        return
    if low_bit.keeps(engine.optimizer):
        yield from _quantised_state(engine)
        return
    views = _views_to_write(engine)
    names: dict[str, list[str]] = {}
    for name, view in views.items():
        names.setdefault(view.source, []).append(name)
    for name, parameter in engine._trainable.items():
        for key, item in sorted(engine.optimizer.state.get(parameter, {}).items()):
            value = item if isinstance(item, torch.Tensor) else torch.tensor(item)
            if value.ndim:
                for _, part in parts_of(
                    engine, {name: value}, {saved_name: views[saved_name] for saved_name in names[name]}
                ):
                    yield replace(part, name=f"{part.name}{SEPARATOR}{key}")
            elif distributed.get_rank() == 0:
                for saved_name in names[name]:
                    yield SavedBox(f"{saved_name}{SEPARATOR}{key}", (), Box((), ()), value)


def _quantised_state(engine: FSDPEngine) -> Iterator[SavedBox]:
    """The state of an optimizer with moments of 8 bits, under names of the module."""
    assert engine.optimizer is not None
    for name, parameter in engine._trainable.items():
        shard_box, _ = engine._shard(parameter)
        for key, item in sorted(engine.optimizer.state.get(parameter, {}).items()):
            value = item if isinstance(item, torch.Tensor) else torch.tensor(item)
            full_name = f"{name}{SEPARATOR}{key}"
            if value.ndim:
                yield from low_bit.stored_parts(full_name, value, shard_box)
            elif distributed.get_rank() == 0:
                yield SavedBox(full_name, (), Box((), ()), value)


def _load_weights(engine: FSDPEngine, saved: SavedBoxes) -> None:
    views = _views_to_read(engine, saved.names)
    of_buffers = {name for name, view in views.items() if view.source not in engine.exported.parameters}
    saved_parts.check_same_model({name: view.shape for name, view in views.items()}, saved, of_buffers)
    stored = frozenset(saved.names)
    for _, part in parts_of(engine, engine.exported.own(), views):
        if part.name in stored:
            _read(part, saved)


def _read(part: SavedBox, saved: SavedBoxes) -> None:
    part.values.copy_(saved.read(part.name, part.box))


def _load_optimizer(engine: FSDPEngine, saved: SavedBoxes) -> None:
    assert engine.optimizer is not None
    keys: dict[str, list[str]] = {}
    for full_name in sorted(saved.names):
        name, _, key = full_name.rpartition(SEPARATOR)
        keys.setdefault(name, []).append(key)
    is_low_bit = low_bit.keeps(engine.optimizer)
    views = _own_views(engine._trainable) if is_low_bit else _views_to_read(engine, keys)
    sources = {name: view.source for name, view in views.items() if view.source in engine._trainable}
    if surplus := sorted(keys.keys() - sources.keys()):
        raise ModelError(
            f"checkpoint {saved.where} belongs to another model: it has optimizer state for {surplus[0]!r}, which this "
            "model does not train"
        )
    # Not where the parameters are: those may be in main memory between updates while the state stays on the device.
    where = torch.device("cpu") if engine._keeps_state_in_main_memory else device.current_device()
    engine.optimizer.state.clear()
    if is_low_bit:
        _load_quantised(engine, saved, keys, where)
        return
    of_source: dict[str, dict[str, View]] = {}
    for name, source in sources.items():
        of_source.setdefault(source, {})[name] = views[name]
    for source, own in of_source.items():
        parameter, first = engine._trainable[source], next(iter(own))
        for key in keys.get(first, ()):
            full_name = f"{first}{SEPARATOR}{key}"
            if key.endswith((low_bit.CODES, low_bit.SCALE)):
                raise ModelError(
                    f"checkpoint {saved.where} has {full_name} of an optimizer with moments of 8 bits: set "
                    "optim.optimizer to that of the run, or leave optimizer out of checkpoint.load_contents"
                )
            if not saved.shape(full_name) and parameter.ndim:
                engine.optimizer.state[parameter][key] = _scalar(engine, saved, full_name, where)
                continue
            value = torch.empty_like(parameter.detach(), dtype=saved.dtype(full_name), device=where)
            engine.optimizer.state[parameter][key] = value
            for _, part in parts_of(engine, {source: value}, own):
                _read(replace(part, name=f"{part.name}{SEPARATOR}{key}"), saved)


def _load_quantised(
    engine: FSDPEngine, saved: SavedBoxes, keys: Mapping[str, Sequence[str]], where: torch.device
) -> None:
    optimizer: Any = engine.optimizer
    for name, state_keys in keys.items():
        parameter = engine._trainable[name]
        shard_box, _ = engine._shard(parameter)
        for key in state_keys:
            full_name = f"{name}{SEPARATOR}{key}"
            if not saved.shape(full_name):
                optimizer.state[parameter][key] = _scalar(engine, saved, full_name, where)
            elif not key.endswith(low_bit.SCALE):  # read together with its codes
                key = key.removesuffix(low_bit.CODES)
                moment = optimizer.new_moment(parameter, signed=key in low_bit.SIGNED, where=where)
                optimizer.state[parameter][key] = moment
                for part in low_bit.stored_parts(f"{name}{SEPARATOR}{key}", moment, shard_box):
                    _read(part, saved)


def _scalar(engine: FSDPEngine, saved: SavedBoxes, name: str, where: torch.device) -> torch.Tensor:
    assert engine.optimizer is not None
    on_device = any(group.get("fused") or group.get("capturable") for group in engine.optimizer.param_groups)
    value = torch.empty((), dtype=saved.dtype(name), device=where if on_device else torch.device("cpu"))
    _read(SavedBox(name, (), Box((), ()), value), saved)
    return value


def _hf_writer(engine: FSDPEngine, copy: bool) -> Callable[[Path], None] | None:
    """Gather the weights on rank 0, and return what writes them as Hugging Face does. All ranks call it together.

    They have the dtype of the checkpoint that training started from. An adapter is merged into them, and is written by
    itself into a folder of theirs.

    Args:
        engine: whose weights they are.
        copy: rank 0 has copies and writes them without the other ranks.
    """
    dtype = getattr(engine.config, "dtype", None)
    dtype = dtype if isinstance(dtype, torch.dtype) else None
    state = _on_rank_zero(engine.exported.whole_tensors(dtype), copy)

    adapter = {} if engine.adapter is None else _on_rank_zero(engine.exported.adapter_tensors(), copy)

    def write(folder: Path) -> None:
        _write_hf(engine, folder, state)
        if engine.adapter is not None:
            lora.save(folder / lora.FOLDER, engine.adapter.config, adapter)

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


def _write_hf(engine: FSDPEngine, folder: Path, state: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not KINDS[engine.model_type].predicts_tokens:
        value.save_value_model(state, engine.config, folder)
    else:
        loading.save_language_model(state, engine.config, folder, engine.model_config.trust_remote_code)
    saved_parts.save_tokenizer(engine.model_config, folder)
