"""DeepSeek-V2 and V3: multi-latent attention, and experts of which some are shared."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from hybridrl.engine.megatron.families.decoder import (
    DECODER_RULES,
    EXPERT_RULES,
    LAYER,
    Decoder,
    refuse,
    rope,
    shared_expert_rules,
)
from hybridrl.engine.megatron.families.mixture import expert_kwargs
from hybridrl.engine.megatron.mapping import (
    ColumnParallel,
    ColumnParallelIfCut,
    Kind,
    Replicated,
    register_family,
    text_config,
)

_OURS, _THEIRS = "decoder.layers.{layer}.self_attention.", LAYER + "self_attn."

#: Attention through latent vectors of queries, and of keys and values.
MLA_RULES: dict[str, Kind] = {
    _OURS + "linear_q_proj.weight": ColumnParallel(_THEIRS + "q_proj.weight"),
    _OURS + "linear_q_down_proj.weight": ColumnParallelIfCut(_THEIRS + "q_a_proj.weight"),
    _OURS + "linear_q_up_proj.weight": ColumnParallel(_THEIRS + "q_b_proj.weight"),
    _OURS + "linear_kv_down_proj.weight": ColumnParallelIfCut(_THEIRS + "kv_a_proj_with_mqa.weight"),
    _OURS + "linear_kv_up_proj.weight": ColumnParallel(_THEIRS + "kv_b_proj.weight"),
    _OURS + "q_layernorm.weight": Replicated(_THEIRS + "q_a_layernorm.weight"),
    _OURS + "kv_layernorm.weight": Replicated(_THEIRS + "kv_a_layernorm.weight"),
}


class DeepSeek(Decoder):
    """Common part of DeepSeek-V2 and DeepSeek-V3."""

    rules: ClassVar[dict[str, Kind]] = {
        **DECODER_RULES,
        **MLA_RULES,
        **EXPERT_RULES,
        **shared_expert_rules("shared_experts"),
        "decoder.layers.{layer}.mlp.router.expert_bias": Replicated(LAYER + "mlp.gate.e_score_correction_bias"),
    }

    def check(self, config: PreTrainedConfig) -> None:
        super().check(config)
        if text_config(config).attention_bias:
            refuse(config, "attention_bias", "false")

    def check_rope(self, config: PreTrainedConfig) -> None:
        rope_parameters = rope(config)
        if rope_parameters["rope_type"] not in ("default", "yarn"):
            refuse(config, "rope_parameters", "rope_type default or yarn")
        if rope_parameters.get("attention_factor") is not None or not rope_parameters.get("truncate", True):
            refuse(config, "rope_parameters", "no attention_factor, and truncate=true")

    def transformer_kwargs(self, config: PreTrainedConfig) -> dict[str, Any]:
        text, rope_parameters = text_config(config), rope(config)
        layers = [index >= int(text.first_k_dense_replace) for index in range(text.num_hidden_layers)]
        kwargs = {
            **super().transformer_kwargs(config),
            **expert_kwargs(text.n_routed_experts, text.num_experts_per_tok, text.moe_intermediate_size, layers),
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "num_query_groups": int(text.num_attention_heads),
            "q_lora_rank": text.q_lora_rank,
            "kv_lora_rank": int(text.kv_lora_rank),
            "qk_head_dim": int(text.qk_nope_head_dim),
            "qk_pos_emb_head_dim": int(text.qk_rope_head_dim),
            "v_head_dim": int(text.v_head_dim),
            "rotary_base": float(rope_parameters["rope_theta"]),
            "moe_router_topk_scaling_factor": float(text.routed_scaling_factor),
        }
        if text.n_shared_experts:
            kwargs["moe_shared_expert_intermediate_size"] = int(text.n_shared_experts * text.moe_intermediate_size)
        if rope_parameters["rope_type"] == "default":
            return {**kwargs, "rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
        return {
            **kwargs,
            "rope_type": "yarn",
            "rotary_scaling_factor": float(rope_parameters["factor"]),
            "original_max_position_embeddings": int(rope_parameters["original_max_position_embeddings"]),
            "beta_fast": float(rope_parameters.get("beta_fast") or 32),
            "beta_slow": float(rope_parameters.get("beta_slow") or 1),
            "mscale": float(rope_parameters.get("mscale") or 1.0),
            "mscale_all_dim": float(rope_parameters.get("mscale_all_dim") or 0.0),
        }

    def finish(self, config: PreTrainedConfig, chunk: Any) -> None:
        """Nothing: Megatron's attention computes its own positions."""


@register_family("deepseek_v2")
class DeepSeekV2(DeepSeek):
    """Experts are chosen and weighted by a softmax."""

    def check(self, config: PreTrainedConfig) -> None:
        super().check(config)
        text = text_config(config)
        if text.topk_method != "greedy":
            refuse(config, "topk_method", "greedy (Megatron ranks groups of experts by a sum, not by their maximum)")
        if text.norm_topk_prob:
            refuse(config, "norm_topk_prob", "false")

    def transformer_kwargs(self, config: PreTrainedConfig) -> dict[str, Any]:
        return {**super().transformer_kwargs(config), "moe_router_pre_softmax": True}


@register_family("deepseek_v3")
class DeepSeekV3(DeepSeek):
    """Experts are chosen by a sigmoid with a bias, within groups. Layers that predict further tokens are left out."""

    def check(self, config: PreTrainedConfig) -> None:
        super().check(config)
        text = text_config(config)
        if not text.norm_topk_prob:
            refuse(config, "norm_topk_prob", "true")
        if text.n_group > 1 and text.num_experts_per_tok // text.topk_group != 2:
            refuse(config, "topk_group", "num_experts_per_tok // topk_group = 2 (Megatron ranks groups by as many)")
        if not text.rope_interleave:
            refuse(config, "rope_interleave", "true")

    def transformer_kwargs(self, config: PreTrainedConfig) -> dict[str, Any]:
        text = text_config(config)
        kwargs = {
            **super().transformer_kwargs(config),
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            # The bias is the checkpoint's. Its update balances experts in pretraining, and is no part of the loss.
            "moe_router_bias_update_rate": 0.0,
        }
        if text.n_group > 1:
            kwargs |= {"moe_router_num_groups": int(text.n_group), "moe_router_group_topk": int(text.topk_group)}
        return kwargs
