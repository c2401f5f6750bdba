"""Gemma and Gemma 3 (its language model).

Both scale the embeddings, and their norms multiply by 1 + weight. Gemma 3 also normalises what attention and MLP add,
and has other rotary positions in the layers with a sliding window. Gemma 2 caps its logits, which Megatron-core cannot.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from hybridrl.engine.megatron.families.decoder import DECODER_RULES, LAYER, Decoder, frequencies, refuse, rope
from hybridrl.engine.megatron.layers import RMSNorm
from hybridrl.engine.megatron.mapping import Kind, Replicated, register_family, text_config


@register_family("gemma")
class Gemma(Decoder):
    """Embeddings are multiplied by the square root of their size; norms have weights around 0."""

    activations: ClassVar[dict[str, Any]] = {"gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh")}

    def check(self, config: PreTrainedConfig) -> None:
        super().check(config)
        text = text_config(config)
        for field in ("attention_bias", "use_bidirectional_attention"):
            if getattr(text, field, False):
                refuse(config, field, "false")

    def transformer_kwargs(self, config: PreTrainedConfig) -> dict[str, Any]:
        return {
            **super().transformer_kwargs(config),
            "layernorm_zero_centered_gamma": True,
            "bias_activation_fusion": False,  # Megatron fuses other activation functions
        }

    def finish(self, config: PreTrainedConfig, chunk: Any) -> None:
        super().finish(config, chunk)
        if chunk.pre_process:
            scale = float(text_config(config).hidden_size) ** 0.5
            chunk.embedding.word_embeddings.register_forward_hook(functools.partial(_scale, scale))


@register_family("gemma3_text")
class Gemma3(Gemma):
    """Norms of what attention and MLP add, and of queries and keys; most layers have a sliding window."""

    rules: ClassVar[dict[str, Kind]] = {
        **DECODER_RULES,
        "decoder.layers.{layer}.pre_mlp_layernorm.weight": Replicated(LAYER + "pre_feedforward_layernorm.weight"),
        "decoder.layers.{layer}.post_attention_layernorm.weight": Replicated(LAYER + "post_attention_layernorm.weight"),
        "decoder.layers.{layer}.post_mlp_layernorm.weight": Replicated(LAYER + "post_feedforward_layernorm.weight"),
    }

    def check(self, config: PreTrainedConfig) -> None:
        super().check(config)
        for field in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(text_config(config), field, None):
                refuse(config, field, "null")
        if rope(config, "sliding_attention")["rope_type"] != "default":
            refuse(config, "rope_parameters", "rope_type default in sliding_attention")

    def transformer_kwargs(self, config: PreTrainedConfig) -> dict[str, Any]:
        scale = float(text_config(config).query_pre_attn_scalar) ** -0.5
        return {**super().transformer_kwargs(config), "qk_layernorm": True, "softmax_scale": scale}

    def finish(self, config: PreTrainedConfig, chunk: Any) -> None:
        super().finish(config, chunk)
        windows, model_config = self.windows(config), chunk.config
        everywhere, in_windows = frequencies(config), frequencies(config, "sliding_attention")
        for layer in chunk.decoder.layers:
            layer.post_attention_layernorm = RMSNorm(
                model_config, model_config.hidden_size, model_config.layernorm_epsilon
            )
            layer.post_mlp_layernorm = RMSNorm(model_config, model_config.hidden_size, model_config.layernorm_epsilon)
            layer.self_attention.register_forward_hook(functools.partial(_normalise, layer.post_attention_layernorm))
            layer.mlp.register_forward_hook(functools.partial(_normalise, layer.post_mlp_layernorm))
            if windows[layer.layer_number - 1]:
                turn = functools.partial(_other_frequencies, float(everywhere[0]), in_windows)
                layer.self_attention.register_forward_pre_hook(turn, with_kwargs=True)


def _normalise(norm: nn.Module, module: nn.Module, inputs: Any, output: tuple[torch.Tensor, None]) -> tuple[Any, None]:
    return norm(output[0]), None  # there are no biases


def _other_frequencies(
    first: float, window_frequencies: torch.Tensor, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the rotary angles of all positions, which were computed for the whole model."""
    angles = named["rotary_pos_emb"]
    positions = (angles[..., :1] / first).round()
    return inputs, {
        **named,
        "rotary_pos_emb": torch.cat([positions * window_frequencies.to(angles.device)] * 2, dim=-1),
    }


def _scale(scale: float, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * torch.tensor(scale, dtype=output.dtype, device=output.device)
