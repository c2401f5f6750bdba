"""Mixtures of experts: Qwen2-MoE, Qwen3-MoE and Mixtral."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from hybridrl.engine.megatron.families.decoder import (
    DECODER_RULES,
    EXPERT_RULES,
    LAYER,
    Decoder,
    refuse,
    shared_expert_rules,
)
from hybridrl.engine.megatron.families.llama import Mistral
from hybridrl.engine.megatron.mapping import Kind, Replicated, RowParallel, Stacked, register_family, text_config


def expert_kwargs(experts: int, per_token: int, width: int, layers: list[bool]) -> dict[str, Any]:
    """Return the fields of Megatron's `TransformerConfig` for experts.

    Args:
        experts: how many a layer has.
        per_token: how many compute each token.
        width: of an expert's MLP.
        layers: which decoder layers have experts.
    """
    return {
        "num_moe_experts": experts,
        "moe_router_topk": per_token,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": [int(has) for has in layers],
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


class QwenMoe(Decoder):
    """Common part of Qwen2-MoE and Qwen3-MoE: the layers with experts, and the weights of the router."""

    def check(self, config: PreTrainedConfig) -> None:
        super().check(config)
        if getattr(text_config(config), "attention_bias", False):
            refuse(config, "attention_bias", "false")

    def transformer_kwargs(self, config: PreTrainedConfig) -> dict[str, Any]:
        text = text_config(config)
        only_mlp, step = set(text.mlp_only_layers or ()), int(text.decoder_sparse_step)
        layers = [index not in only_mlp and (index + 1) % step == 0 for index in range(text.num_hidden_layers)]
        return {
            **super().transformer_kwargs(config),
            **expert_kwargs(text.num_experts, text.num_experts_per_tok, text.moe_intermediate_size, layers),
            # Normalising the weights of the chosen experts is a softmax over those alone.
            "moe_router_pre_softmax": not text.norm_topk_prob,
        }


@register_family("qwen3_moe")
class Qwen3Moe(QwenMoe):
    """Queries and keys are normalised per head; no shared expert."""

    rules: ClassVar[dict[str, Kind]] = {**DECODER_RULES, **EXPERT_RULES}

    def transformer_kwargs(self, config: PreTrainedConfig) -> dict[str, Any]:
        return {**super().transformer_kwargs(config), "qk_layernorm": True}


@register_family("qwen2_moe")
class Qwen2Moe(QwenMoe):
    """Biases of query, key and value, and a shared expert with a gate."""

    rules: ClassVar[dict[str, Kind]] = {**DECODER_RULES, **EXPERT_RULES, **shared_expert_rules("shared_expert")}

    def transformer_kwargs(self, config: PreTrainedConfig) -> dict[str, Any]:
        text = text_config(config)
        return {
            **super().transformer_kwargs(config),
            "add_qkv_bias": bool(text.qkv_bias),
            "moe_shared_expert_intermediate_size": int(text.shared_expert_intermediate_size),
            "moe_shared_expert_gate": True,
        }


@register_family("mixtral")
class Mixtral(Mistral):
    """Experts in every layer."""

    _EXPERTS = LAYER + "block_sparse_moe.experts.{expert}."
    rules: ClassVar[dict[str, Kind]] = {
        **DECODER_RULES,
        "decoder.layers.{layer}.mlp.router.weight": Replicated(LAYER + "block_sparse_moe.gate.weight"),
        "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight": Stacked(
            _EXPERTS + "w1.weight", _EXPERTS + "w3.weight"
        ),
        "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight": RowParallel(
            _EXPERTS + "w2.weight"
        ),
    }

    def transformer_kwargs(self, config: PreTrainedConfig) -> dict[str, Any]:
        text = text_config(config)
        layers = [True] * int(text.num_hidden_layers)
        return {
            **super().transformer_kwargs(config),
            **expert_kwargs(text.num_local_experts, text.num_experts_per_tok, text.intermediate_size, layers),
        }
