"""Llama, and Mistral, which differs from it only in names and defaults."""

from __future__ import annotations

from transformers import PreTrainedConfig

from hybridrl.engine.megatron.families.decoder import Decoder, refuse
from hybridrl.engine.megatron.mapping import register_family, text_config


@register_family("llama")
class Llama(Decoder):
    """Llama 2, 3 and their kin."""

    def check(self, config: PreTrainedConfig) -> None:
        super().check(config)
        if getattr(text_config(config), "attention_bias", False):
            refuse(config, "attention_bias", "false")


@register_family("mistral")
class Mistral(Llama):
    """Every layer may have a sliding window."""

    def windows(self, config: PreTrainedConfig) -> list[int]:
        text = text_config(config)
        return [int(getattr(text, "sliding_window", None) or 0)] * int(text.num_hidden_layers)
