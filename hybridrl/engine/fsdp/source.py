"""Where the module of an FSDP2 engine comes from: the model's files, and with LoRA an adapter next to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hybridrl.engine.fsdp import adapted
from hybridrl.engine.fsdp.sharding import Weights
from hybridrl.models import lora
from hybridrl.models.kinds import KINDS


class Source:
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
        return self._with_adapter(self._kind.build(self._config, self._base, self._model.trust_remote_code))

    def load(self) -> nn.Module:
        """The module with its weights, in main memory."""
        base = self._kind.load(self._model.path, self._config, self._base, self._model.trust_remote_code)
        module = self._with_adapter(base)
        if self.adapter is not None:
            lora.fill(module, self._first_values(self.adapter))
        return module

    def open(self) -> Weights:
        """The weights of the module that was built, in the dtype of the checkpoint."""
        weights = self._kind.open(self._model.path, self._config, "auto", self._model.trust_remote_code)
        if self.adapter is None:
            return weights
        return adapted.AdaptedWeights(weights, self._first_values(self.adapter), self._module)

    def _with_adapter(self, module: nn.Module) -> nn.Module:
        self._module = module
        if self._model.adapted:
            self.adapter = adapted.attach(module, self._model, self._trained)
        return module

    def _first_values(self, adapter: lora.Adapter) -> dict[str, torch.Tensor]:
        return adapter.first_values(self._seed, self._model.lora_adapter_path)
