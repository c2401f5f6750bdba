"""Source of an FSDP2 engine's module: the model's files, with LoRA an adapter next to them.

With `model.load_in_4bit` the frozen layers become 4-bit layers (`hybridrl.models.four_bit`). Their weights are packed
one at a time as they are read, so that no rank ever holds the base in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hybridrl.engine.fsdp import adapted
from hybridrl.engine.fsdp.sharding import Weights
from hybridrl.errors import ModelError
from hybridrl.models import four_bit, lora
from hybridrl.models.kinds import KINDS
from hybridrl.models.loading import build_language_model
from hybridrl.models.model_config import config_of
from hybridrl.models.stored import Specs, named_tensors
from hybridrl.notify import notify
from hybridrl.utils import device, distributed


def check_four_bit(model: Any, engine: Any, optim: Any) -> None:
    """Refuse settings that 4-bit layers cannot be combined with; the model is built without weights.

    Raises:
        ModelError: the message names the keys.
    """
    if optim is not None and not model.adapted:
        raise ModelError(
            "model.load_in_4bit=True: weights in 4 bits are not trained; set model.lora_rank, too (QLoRA), or "
            "load_in_4bit=False"
        )
    if engine.use_torch_compile:
        raise ModelError(
            "fsdp_config.use_torch_compile=True with model.load_in_4bit=True: the two were not made to work together; "
            "set one of them to False"
        )
    config = config_of(model)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"model.load_in_4bit=True with {model.path}, whose weights are quantized (quantization_config in "
            "config.json); use the model without quantization"
        )
    four_bit.convert(build_language_model(config, torch.float32, model.trust_remote_code))


class PackedWeights:
    """Weights of which those of 4-bit layers are packed, on this device.

    Args:
        weights: by their names in the module.
        module: with the 4-bit layers.
    """

    def __init__(self, weights: Weights, module: nn.Module) -> None:
        self._weights, self._layers = weights, four_bit.layers_of(module)

    def specs(self) -> Specs:
        """See `StoredWeights.specs`."""
        packed = {name: (name, layer.weight.dtype, tuple(layer.weight.shape)) for name, layer in self._layers.items()}
        return [packed.get(spec[0], spec) for spec in self._weights.specs()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `StoredWeights.tensors`."""
        for name, tensor in self._weights.tensors():
            layer = self._layers.get(name)
            if layer is not None:
                tensor = four_bit.pack(tensor.to(device.current_device())).view(layer.weight.dtype)
            yield name, tensor


class ModuleSource:
    """Builds a module without weights, or with them.

    Args:
        model_type: a name in `KINDS`.
        model: a `ModelConfig`.
        config: its Hugging Face configuration.
        trained: dtype of the parameters that are trained.
        frozen: dtype of those next to an adapter. Nothing accumulates in them, so they need no more precision than the
            computation.
        seed: of a new adapter's first values.

    Attributes:
        adapter: of the module that was built last, if it has one.
    """

    def __init__(
        self,
        model_type: str,
        model: Any,
        config: PreTrainedConfig,
        trained: torch.dtype,
        frozen: torch.dtype,
        seed: int,
    ) -> None:
        self._kind, self._model, self._config = KINDS[model_type], model, config
        self._trained, self._seed = trained, seed
        self._base = frozen if model.adapted else trained
        self._module: nn.Module
        self.adapter: lora.Adapter | None = None

    def build(self) -> nn.Module:
        """The module on the meta device."""
        module = self._with_adapter(self._kind.build(self._config, self._base, self._model.trust_remote_code))
        if self._model.load_in_4bit:
            uneven = four_bit.convert(module)
            if uneven and distributed.get_rank() == 0:
                notify(
                    f"{self._model.path}: model.load_in_4bit leaves {', '.join(uneven)} in 16 bits, whose width is no "
                    f"multiple of {four_bit.BLOCKS[-1]}",
                    once=True,
                )
        return module

    def load(self) -> nn.Module:
        """The module with its weights, in main memory; with 4-bit layers on the device."""
        if self._model.load_in_4bit:
            return self._filled(self.build())
        base = self._kind.load(self._model.path, self._config, self._base, self._model.trust_remote_code)
        module = self._with_adapter(base)
        if self.adapter is not None:
            lora.fill(module, self._first_values(self.adapter))
        return module

    def open(self) -> Weights:
        """The weights of the module that was built, in the dtype of the checkpoint."""
        weights: Weights = self._kind.open(self._model.path, self._config, "auto", self._model.trust_remote_code)
        if self.adapter is not None:
            weights = adapted.AdaptedWeights(weights, self._first_values(self.adapter), self._module)
        return PackedWeights(weights, self._module) if self._model.load_in_4bit else weights

    def _filled(self, module: nn.Module) -> nn.Module:
        module.to_empty(device=device.current_device())
        if hasattr(module, "tie_weights"):
            module.tie_weights()  # type: ignore[operator]  # to_empty separates tied parameters
        targets = dict(named_tensors(module))
        with torch.no_grad():
            for name, value in self.open().tensors():
                targets.pop(name).copy_(value)
        if targets:
            raise ModelError(f"the weight files of {self._model.path} lack {', '.join(sorted(targets)[:5])}")
        return module

    def _with_adapter(self, module: nn.Module) -> nn.Module:
        self._module = module
        if self._model.adapted:
            self.adapter = adapted.attach(module, self._model, self._trained)
        return module

    def _first_values(self, adapter: lora.Adapter) -> dict[str, torch.Tensor]:
        return adapter.first_values(self._seed, self._model.lora_adapter_path)
