"""Qwen2 (and 2.5), Qwen3, and their mixtures of experts."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from hybridrl.engine.megatron.families.decoder import Decoder, refuse
from hybridrl.engine.megatron.mapping import register_family, text_config


@register_family("qwen2")
class Qwen2(Decoder):
    """Biases of query, key and value."""

    def transformer_kwargs(self, config: PreTrainedConfig) -> dict[str, Any]:
        return {**super().transformer_kwargs(config), "add_qkv_bias": True}


@register_family("qwen3")
class Qwen3(Decoder):
    """No biases; queries and keys are normalised per head."""

    def check(self, config: PreTrainedConfig) -> None:
        super().check(config)
        if getattr(text_config(config), "attention_bias", False):
            refuse(config, "attention_bias", "false")

    def transformer_kwargs(self, config: PreTrainedConfig) -> dict[str, Any]:
        return {**super().transformer_kwargs(config), "qk_layernorm": True}
