"""Names, dimensions and positions that most decoders share."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybridrl.engine.megatron.mapping import (
    Family,
    Kind,
    QueryKeyValue,
    Replicated,
    RowParallel,
    Stacked,
    Vocabulary,
    text_config,
)
from hybridrl.errors import ModelError

LAYER = "model.layers.{layer}."

#: Embedding, attention with separate projections, a gated MLP and RMSNorms.
DECODER_RULES: dict[str, Kind] = {
    "embedding.word_embeddings.weight": Vocabulary("model.embed_tokens.weight"),
    "output_layer.weight": Vocabulary("lm_head.weight"),
    "decoder.final_layernorm.weight": Replicated("model.norm.weight"),
    "decoder.layers.{layer}.input_layernorm.weight": Replicated(LAYER + "input_layernorm.weight"),
    "decoder.layers.{layer}.pre_mlp_layernorm.weight": Replicated(LAYER + "post_attention_layernorm.weight"),
    **{
        f"decoder.layers.{{layer}}.self_attention.linear_qkv.{end}": QueryKeyValue(
            *(f"{LAYER}self_attn.{projection}_proj.{end}" for projection in "qkv")
        )
        for end in ("weight", "bias")
    },
    "decoder.layers.{layer}.self_attention.linear_proj.weight": RowParallel(LAYER + "self_attn.o_proj.weight"),
    "decoder.layers.{layer}.self_attention.q_layernorm.weight": Replicated(LAYER + "self_attn.q_norm.weight"),
    "decoder.layers.{layer}.self_attention.k_layernorm.weight": Replicated(LAYER + "self_attn.k_norm.weight"),
    "decoder.layers.{layer}.mlp.linear_fc1.weight": Stacked(
        LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight"
    ),
    "decoder.layers.{layer}.mlp.linear_fc2.weight": RowParallel(LAYER + "mlp.down_proj.weight"),
}

#: A router and experts that are gated MLPs.
EXPERT_RULES: dict[str, Kind] = {
    "decoder.layers.{layer}.mlp.router.weight": Replicated(LAYER + "mlp.gate.weight"),
    "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight": Stacked(
        LAYER + "mlp.experts.{expert}.gate_proj.weight", LAYER + "mlp.experts.{expert}.up_proj.weight"
    ),
    "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight": RowParallel(
        LAYER + "mlp.experts.{expert}.down_proj.weight"
    ),
}


def shared_expert_rules(name: str) -> dict[str, Kind]:
    """Rules of the shared experts, which the checkpoint calls `mlp.<name>`."""
    start = f"{LAYER}mlp.{name}."
    return {
        "decoder.layers.{layer}.mlp.shared_experts.linear_fc1.weight": Stacked(
            start + "gate_proj.weight", start + "up_proj.weight"
        ),
        "decoder.layers.{layer}.mlp.shared_experts.linear_fc2.weight": RowParallel(start + "down_proj.weight"),
        "decoder.layers.{layer}.mlp.shared_experts.gate_weight": Replicated(f"{LAYER}mlp.{name}_gate.weight"),
    }


def refuse(config: PreTrainedConfig, field: str, possible: str) -> None:
    """Raise `ModelError` for a field of config.json that Megatron-core cannot represent."""
    setting = getattr(text_config(config), field, None)
    raise ModelError(
        f"strategy=megatron cannot build a {config.model_type} with {field}={setting!r} in config.json; it can with "
        f"{possible}. Use strategy=fsdp2 for this model"
    )


def rope(config: PreTrainedConfig, layer_type: str = "full_attention") -> dict[str, Any]:
    """Return `rope_parameters`, with a type and a base; of the given kind of layer if they differ by it."""
    parameters = getattr(text_config(config), "rope_parameters", None) or {}
    return {"rope_type": "default", "rope_theta": 10000.0, **parameters.get(layer_type, parameters)}


def frequencies(config: PreTrainedConfig, layer_type: str = "full_attention") -> torch.Tensor:
    """Return the inverse frequencies of rotary positions, as the Hugging Face model has them."""
    text, rope_parameters = text_config(config), rope(config, layer_type)
    if rope_parameters["rope_type"] == "default":
        steps = torch.arange(0, head_size(config), 2, dtype=torch.float32) / head_size(config)
        return 1.0 / (rope_parameters["rope_theta"] ** steps)
    by_type = layer_type in (text.rope_parameters or {})
    inverse_frequencies, _ = ROPE_INIT_FUNCTIONS[rope_parameters["rope_type"]](
        text, torch.device("cpu"), **({"layer_type": layer_type} if by_type else {})
    )
    return inverse_frequencies


def activation(config: PreTrainedConfig) -> str:
    """Return the name of the activation function of the MLP."""
    text = text_config(config)
    return str(getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None))


def head_size(config: PreTrainedConfig) -> int:
    """Return the size of an attention head."""
    text = text_config(config)
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def window_kwargs(windows: list[int]) -> dict[str, Any]:
    """Return the fields of Megatron's `TransformerConfig` for sliding windows; a model has one size of window."""
    if not any(windows):
        return {}
    # Megatron counts the tokens before a token, without itself.
    return {"window_size": (max(windows) - 1, 0), "window_attn_skip_freq": [int(size > 0) for size in windows]}


class Decoder(Family):
    """A decoder with RMSNorms, rotary positions, grouped-query attention and a gated MLP."""

    rules = DECODER_RULES
    #: `hidden_act` of config.json: Megatron's activation function
    activations: ClassVar[dict[str, Any]] = {"silu": F.silu}

    def check(self, config: PreTrainedConfig) -> None:
        text = text_config(config)
        if activation(config) not in self.activations:
            refuse(config, "hidden_act", " or ".join(self.activations))
        if getattr(text, "mlp_bias", False):
            refuse(config, "mlp_bias", "false")
        self.check_rope(config)

    def check_rope(self, config: PreTrainedConfig) -> None:
        """Refuse scalings of rotary positions that are more than other frequencies."""
        rope_parameters = rope(config)
        if rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
            refuse(config, "rope_parameters", "partial_rotary_factor=1")
        if rope_parameters["rope_type"] not in ("default", "linear", "llama3"):
            refuse(config, "rope_parameters", "rope_type default, linear or llama3")

    def transformer_kwargs(self, config: PreTrainedConfig) -> dict[str, Any]:
        text = text_config(config)
        heads = int(text.num_attention_heads)
        return {
            **window_kwargs(self.windows(config)),
            "num_layers": int(text.num_hidden_layers),
            "hidden_size": int(text.hidden_size),
            "ffn_hidden_size": int(text.intermediate_size),
            "num_attention_heads": heads,
            "num_query_groups": int(getattr(text, "num_key_value_heads", None) or heads),
            "kv_channels": head_size(config),
            "normalization": "RMSNorm",
            "layernorm_epsilon": float(text.rms_norm_eps),
            "gated_linear_unit": True,
            "activation_func": self.activations[activation(config)],
            "add_bias_linear": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }

    def windows(self, config: PreTrainedConfig) -> list[int]:
        """Return the sliding window of each decoder layer: how many tokens a token attends to, 0 for all before it."""
        text = text_config(config)
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * int(text.num_hidden_layers)
        return [int(text.sliding_window or 0) if kind == "sliding_attention" else 0 for kind in kinds]

    def model_kwargs(self, config: PreTrainedConfig) -> dict[str, Any]:
        text, rope_parameters = text_config(config), rope(config)
        return {
            "position_embedding_type": "rope",
            "rotary_base": rope_parameters["rope_theta"],
            "max_sequence_length": int(text.max_position_embeddings),
            "share_embeddings_and_output_weights": bool(config.tie_word_embeddings),
        }

    def finish(self, config: PreTrainedConfig, chunk: Any) -> None:
        if rope(config)["rope_type"] != "default":
            # The model's own frequencies: Megatron knows the scalings only with fixed parameters.
            chunk.rotary_pos_emb.inv_freq = frequencies(config).to(chunk.rotary_pos_emb.inv_freq.device)
