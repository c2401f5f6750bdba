"""Behaviour of an FSDP2 engine with an adapter: A and B are added to a frozen base, and saved without it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridrl.engine.fsdp.sharding import Weights
from hybridrl.errors import ModelError
from hybridrl.models import four_bit, lora
from hybridrl.models.stored import Specs, named_tensors
from hybridrl.notify import notify
from hybridrl.utils import distributed

#: next to the adapter's tensors in a checkpoint: which base they belong to
BASE_FILE = "base.txt"
#: likewise, of a base in 4 bits: how it was rounded, and the dtype of the values that training computed with
ROUNDING_FILE = "base_4bit.json"


class AdaptedWeights:
    """The weights of a base and the first values of its adapter, by their names in the module with the adapter.

    Args:
        base: the weights of the base.
        values: of the adapter, by their names in the module.
        module: the module with the adapter.
    """

    def __init__(self, base: Weights, values: Mapping[str, torch.Tensor], module: nn.Module) -> None:
        self._base, self._values = base, values
        self._names = {lora.base_name(name): name for name, _ in named_tensors(module) if not lora.is_own(name)}

    def specs(self) -> Specs:
        """See `StoredWeights.specs`."""
        own = {name: (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._values.items()}
        of_base = {self._name(name): (self._name(name), dtype, shape) for name, dtype, shape in self._base.specs()}
        return list({**of_base, **own}.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `StoredWeights.tensors`."""
        for name, tensor in self._base.tensors():
            if self._name(name) not in self._values:
                yield self._name(name), tensor
        yield from self._values.items()

    def _name(self, name: str) -> str:
        return self._names.get(name, name)


def attach(module: nn.Module, model: Any, dtype: torch.dtype) -> lora.Adapter:
    """Attach the adapter of a `ModelConfig`, and warn of modules without one; see `lora.attach`."""
    adapter = lora.attach(module, model, dtype)
    if lora.has_fused_experts(module) and distributed.get_rank() == 0:
        notify(f"{model.path}: the weights of experts stay frozen and get no adapter", once=True)
    return adapter


def check(model: Any, engine: Any, optim: Any) -> None:
    """Refuse settings that an adapter cannot be combined with.

    Raises:
        ModelError: the message names the keys.
    """
    lora.check(model, optim)
    if engine.use_torch_compile:
        raise ModelError(
            "fsdp_config.use_torch_compile=True with model.lora_rank or model.lora_adapter_path: the two were not made "
            "to work together; set it to False"
        )
    if engine.router_aux_loss_coef:
        raise ModelError(
            f"fsdp_config.router_aux_loss_coef={engine.router_aux_loss_coef} with model.lora_rank or "
            "model.lora_adapter_path: the routers are frozen, so their load cannot be balanced; set it to 0"
        )


def required_adapter(adapter: lora.Adapter | None) -> lora.Adapter:
    """Return the adapter of a model.

    Raises:
        ModelError: all weights of the model are trained.
    """
    if adapter is None:
        raise ModelError("this model has no adapter: set model.lora_rank, or model.lora_adapter_path")
    return adapter


def config_text(adapter: lora.Adapter) -> str:
    """See `HasAdapters.adapter_config`."""
    return lora.as_text(adapter.config, heads=map(lora.file_name, adapter.names))


def notes(adapter: lora.Adapter, model: Any, compute_dtype: torch.dtype) -> dict[str, str]:
    """Return files next to the adapter's tensors in a checkpoint, by name: what it is, and of which base.

    Args:
        adapter: the adapter.
        model: a `ModelConfig`.
        compute_dtype: dtype of the forward pass.
    """
    files = {
        lora.CONFIG_FILE: config_text(adapter),
        BASE_FILE: lora.base_digest(model.path) + "\n",
    }
    if model.load_in_4bit:
        rounding = {
            "format": "nf4",
            "blocks": list(four_bit.BLOCKS),
            "dtype": str(compute_dtype).rpartition(".")[2],
        }
        files[ROUNDING_FILE] = json.dumps(rounding) + "\n"
    return files


def base_dtype(folder: Path) -> torch.dtype | None:
    """The dtype of the values of a 4-bit base that an adapter was trained with; None for a base that was not in 4 bits.

    Args:
        folder: the part `model` of a checkpoint.
    """
    file = folder / ROUNDING_FILE
    if not file.is_file():
        return None
    dtype: torch.dtype = getattr(torch, json.loads(file.read_text(encoding="utf-8"))["dtype"])
    return dtype


def check_saved(adapter: lora.Adapter, model: Any, folder: Path) -> None:
    """Refuse a checkpoint's adapter that would compute something else here than it did.

    Args:
        adapter: that of the engine.
        model: a `ModelConfig`.
        folder: the part `model` of a checkpoint.

    Raises:
        ModelError: it belongs to another base (`check_base`), or to one of other precision, or its product was scaled
            otherwise.
    """
    check_base(model.path, folder)
    if not (folder / lora.CONFIG_FILE).is_file():
        return  # whole weights, which are refused by their names
    rounded = base_dtype(folder) is not None
    if rounded != model.load_in_4bit:
        raise ModelError(
            f"checkpoint {folder} holds an adapter of a base {'in 4 bits' if rounded else 'that was not in 4 bits'}: "
            f"set model.load_in_4bit={rounded}, as in the run that wrote it"
        )
    was, now = lora.read_config(folder), adapter.config
    for name in ("lora_alpha", "use_rslora", "alpha_pattern"):
        if getattr(was, name) != getattr(now, name):
            raise ModelError(
                f"checkpoint {folder} holds an adapter with {name}={getattr(was, name)}, and here it is "
                f"{getattr(now, name)}, by which the same matrices are another model: set model.lora_alpha (or "
                "model.lora_adapter_path) to that of the run"
            )


def check_base(path: str, folder: Path) -> None:
    """Refuse the adapter of another base.

    Args:
        path: of the base.
        folder: the part `model` of a checkpoint.

    Raises:
        ModelError: the base's weights are not those that the adapter was trained with.
    """
    file = folder / BASE_FILE
    was = file.read_text(encoding="utf-8").strip() if file.is_file() else None
    now = lora.base_digest(path)
    if was is not None and was != now:
        raise ModelError(
            f"checkpoint {folder} holds an adapter of other weights than those of {path} ({was} and {now}): set "
            "model.path to the base that the run was started with"
        )
