"""An engine's state on disk, readable on any number of ranks and without unpickling anything.

The folder of a checkpoint:

    model/      float32 master weights: the shards of every rank as safetensors, written and resharded by
                torch.distributed.checkpoint
    optimizer/  the optimizer's tensors, in the same way, named `<parameter>/<state>`
    extra/      schedule.json, and rng_<rank>.json of every rank
    hf_model/   the model as Hugging Face loads it: safetensors, config.json, tokenizer
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from hybridrl.engine.optim import low_bit
from hybridrl.engine.optim.optimizer import set_rate
from hybridrl.engine.train_engine import SAVE_CONTENTS
from hybridrl.errors import ModelError
from hybridrl.models import loading, value
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.notify import notify
from hybridrl.utils import distributed
from hybridrl.utils.rng import rng_state, seed_rng, set_rng_state

if TYPE_CHECKING:
    from hybridrl.engine.fsdp.engine import FSDPEngine

SEPARATOR = "/"


def save(engine: FSDPEngine, folder: Path, contents: Sequence[str]) -> None:
    """Write the parts named in `contents` into `folder`. All ranks call it with the same arguments."""
    _check(contents)
    folder.mkdir(parents=True, exist_ok=True)
    if "model" in contents:
        _write({name: parameter.detach() for name, parameter in engine._parameters.items()}, folder / "model")
    if "optimizer" in contents and engine.optimizer is not None:
        _write(_optimizer_tensors(engine), folder / "optimizer")
    if "extra" in contents:
        _save_extra(engine, folder / "extra")
    if "hf_model" in contents:
        _save_hf(engine, folder / "hf_model")
    distributed.barrier()


def load(engine: FSDPEngine, folder: Path, contents: Sequence[str]) -> None:
    """Read the parts named in `contents`. `hf_model` is for other programs and is never read back.

    Raises:
        ModelError: a part is missing, or belongs to another model or optimizer.
    """
    _check(contents)
    if "model" in contents:
        _read({name: parameter.detach() for name, parameter in engine._parameters.items()}, _part(folder, "model"))
    if "optimizer" in contents and engine.optimizer is not None:
        _load_optimizer(engine, _part(folder, "optimizer"))
    if "extra" in contents:
        _load_extra(engine, _part(folder, "extra"))


def _check(contents: Sequence[str]) -> None:
    unknown = sorted(set(contents) - set(SAVE_CONTENTS))
    if unknown:
        raise ModelError(f"checkpoint contents {', '.join(unknown)} are unknown; known are {', '.join(SAVE_CONTENTS)}")


def _part(folder: Path, name: str) -> Path:
    part = folder / name
    if not part.is_dir():
        raise ModelError(
            f"checkpoint {folder} has no {name}/ (it was saved without {name!r} in checkpoint.save_contents); "
            f"remove {name!r} from checkpoint.load_contents, or resume from another checkpoint"
        )
    return part


def _write(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _without_notice():
        dcp.save(dict(tensors), storage_writer=writer, no_dist=not distributed.is_distributed())


def _read(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill `tensors` in place from `folder`, which any number of ranks may have written."""
    _compare(tensors, _stored(folder), folder)
    with _without_notice():
        reader = HuggingFaceStorageReader(str(folder))
        dcp.load(dict(tensors), storage_reader=reader, no_dist=not distributed.is_distributed())


def _stored(folder: Path) -> dict[str, Any]:
    """The tensors in a folder, by name."""
    try:
        return dict(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ModelError(f"checkpoint {folder} cannot be read ({error}); resume from an earlier one") from error


@contextlib.contextmanager
def _without_notice() -> Iterator[None]:
    """A single process saves without a process group on purpose; PyTorch would warn about it every time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _compare(tensors: dict[str, torch.Tensor], stored: dict[str, Any], folder: Path) -> None:
    missing, surplus = sorted(tensors.keys() - stored.keys()), sorted(stored.keys() - tensors.keys())
    reshaped = [n for n in sorted(tensors.keys() & stored.keys()) if tuple(tensors[n].shape) != tuple(stored[n].size)]
    if not (missing or surplus or reshaped):
        return
    parts = [
        f"{len(names)} {what} (first: {names[0]})"
        for what, names in (("are missing", missing), ("are unexpected", surplus))
        if names
    ]
    if reshaped:
        name = reshaped[0]
        parts.append(
            f"{name} has shape {list(stored[name].size)} in the checkpoint and {list(tensors[name].shape)} in the model"
        )
    raise ModelError(
        f"checkpoint {folder} belongs to another model: of its tensors {'; '.join(parts)}. Set model.path to the "
        "model that this run was started with, or trainer.resume_mode=disable to start from the beginning"
    )


def _optimizer_tensors(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    assert engine.optimizer is not None
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in engine._trainable.items():
        for key, item in engine.optimizer.state.get(parameter, {}).items():
            item = item if isinstance(item, torch.Tensor) else torch.tensor(item)
            tensors |= _stored_state(engine, name, key, item)
    return tensors


def _stored_state(engine: FSDPEngine, name: str, key: str, item: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor of the optimizer's state with its names on disk; an 8-bit moment has two."""
    parameter, full_name = engine._trainable[name], f"{name}{SEPARATOR}{key}"
    if item.ndim and low_bit.keeps(engine.optimizer):
        return dict(low_bit.stored_parts(parameter, full_name, item))
    return {full_name: item}


def _load_optimizer(engine: FSDPEngine, folder: Path) -> None:
    assert engine.optimizer is not None
    wanted: dict[str, torch.Tensor] = {}
    engine.optimizer.state.clear()
    for full_name, entry in sorted(_stored(folder).items()):
        name, _, key = full_name.rpartition(SEPARATOR)
        parameter = engine._trainable.get(name)
        if parameter is None:
            raise ModelError(
                f"checkpoint {folder} belongs to another model: it has optimizer state for {name!r}, which this "
                "model does not train"
            )
        if entry.size and low_bit.keeps(engine.optimizer):
            key = key.removesuffix(low_bit.CODES)
            if key.endswith(low_bit.SCALE):
                continue  # read together with its codes
            state = engine.optimizer.new_moment(parameter, signed=key in low_bit.SIGNED)
        elif tuple(entry.size) == tuple(parameter.shape) and entry.size:
            state = torch.empty_like(parameter.detach(), dtype=entry.properties.dtype)
        else:
            on_device = any(group.get("fused") or group.get("capturable") for group in engine.optimizer.param_groups)
            where = _local_device(parameter) if on_device else torch.device("cpu")
            state = torch.empty(tuple(entry.size), dtype=entry.properties.dtype, device=where)
        engine.optimizer.state[parameter][key] = state
        wanted |= _stored_state(engine, name, key, state)
    _read(wanted, folder)


def _local_device(parameter: torch.Tensor) -> torch.device:
    return parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device


def _save_extra(engine: FSDPEngine, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rng_{distributed.get_rank()}.json").write_text(json.dumps(rng_state()), encoding="utf-8")
    if distributed.get_rank() == 0 and engine.schedule is not None:
        (folder / "schedule.json").write_text(json.dumps({"step": engine.schedule.last_epoch}), encoding="utf-8")


def _load_extra(engine: FSDPEngine, folder: Path) -> None:
    schedule_file = folder / "schedule.json"
    if engine.schedule is not None:
        try:
            step = int(json.loads(schedule_file.read_text(encoding="utf-8"))["step"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{schedule_file} cannot be read: {error}") from error
        # The rate depends on the step alone, so settings that were changed since then take effect.
        engine.schedule.last_epoch = step
        for group, base, factor in zip(
            engine.schedule.optimizer.param_groups, engine.schedule.base_lrs, engine.schedule.lr_lambdas, strict=True
        ):
            set_rate(group, base * factor(step))
        engine.schedule._last_lr = [group["lr"] for group in engine.schedule.optimizer.param_groups]
    rng_file = folder / f"rng_{distributed.get_rank()}.json"
    if rng_file.is_file():
        set_rng_state(json.loads(rng_file.read_text(encoding="utf-8")))
        return
    saved, step = len(list(folder.glob("rng_*.json"))), 0 if engine.schedule is None else engine.schedule.last_epoch
    seed = _seed_of(engine.engine_config.seed, distributed.get_rank(), step)
    seed_rng(seed)
    notify(
        f"{folder} was saved by {saved} ranks and holds no random state of rank {distributed.get_rank()}; its "
        f"generators are seeded with {seed}, from the run's seed {engine.engine_config.seed}, the rank and the step "
        f"{step}",
        "warning",
    )


def _seed_of(*numbers: int) -> int:
    """A 32-bit seed that depends on each number, so that new ranks share no stream with each other or with old ones."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _save_hf(engine: FSDPEngine, folder: Path) -> None:
    """Gather the weights on rank 0 and write them as Hugging Face does.

    They have the dtype of the checkpoint that training started from.
    """
    dtype = getattr(engine.config, "dtype", None)
    dtype = dtype if isinstance(dtype, torch.dtype) else None
    state = {}
    for name, tensor in engine.whole_tensors(dtype):
        if distributed.get_rank() == 0:
            state[name] = tensor.cpu().contiguous()
    if distributed.get_rank() != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if engine.model_type == "value_model":
        value.save_value_model(state, engine.config, folder)
    else:
        loading.save_language_model(state, engine.config, folder, engine.model_config.trust_remote_code)
    model = engine.model_config
    generation = Path(model.path).expanduser() / "generation_config.json"
    if generation.is_file():  # it lists all EOS ids, which config.json may not
        shutil.copyfile(generation, folder / generation.name)
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code, model.custom_chat_template)
    tokenizer.save_pretrained(folder)
