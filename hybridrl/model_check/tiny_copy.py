"""A random model with the layers of another one's configuration, small enough for a laptop."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from hybridrl.models.loading import auto_class
from hybridrl.utils.files import use_umask

#: sizes by the names that configurations have for them; a model keeps what is smaller
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 320),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "out_hidden_size", "word_embed_proj_dim"), 128),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(
        ("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size", "shared_intermediate_size"), 48
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "num_heads", "linear_num_value_heads", "mamba_n_heads", "index_n_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "mamba_n_groups"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim"), 32),
    **dict.fromkeys(("v_head_dim", "linear_key_head_dim"), 16),
    **dict.fromkeys(("linear_value_head_dim", "qk_rope_head_dim", "mamba_d_state", "mamba_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_head_dim"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "index_topk"), 256),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 6),
    **dict.fromkeys(("depth", "vision_layers"), 2),
    **dict.fromkeys(("hidden_size_per_layer_input", "index_head_dim"), 8),
}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
#: how often a layer of another kind comes, by the names of configurations; they become 2
_EVERY = ("full_attention_interval", "attn_layer_period", "expert_layer_period", "sliding_window_pattern")
#: numbers of layers before others begin; they become 1
_FIRST = (
    *("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    *("attn_layer_offset", "expert_layer_offset"),
)
_SPREAD, _NOISE = 4.0, 0.05
_SPECIAL = 16  # ids at the end of a small vocabulary, for special tokens


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration of the same kinds of layers with small sizes.

    Of each kind that `layer_types` and its like name, the first two layers are kept.

    Args:
        config: of a model of any size.
    """
    shrunken = _shrunken(config.to_dict())
    return type(config).from_dict(shrunken)


def write_tiny_copy(config: PreTrainedConfig, folder: Path, seed: int = 0) -> PreTrainedConfig:
    """Write a model of `tiny_config` whose weights are random, all of them different from zero and one.

    Args:
        config: of a model of any size.
        folder: for `config.json` and the weights.

    Returns:
        The configuration that was written.
    """
    small = tiny_config(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class(small).from_config(copy.deepcopy(small), dtype=torch.float32)
        with torch.no_grad():
            for _, parameter in sorted(model.named_parameters()):
                if parameter.dim() > 1:  # far from a distribution over tokens that is uniform, which hides faults
                    parameter.mul_(_SPREAD)
                parameter.add_(torch.randn_like(parameter) * _NOISE)
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        use_umask(file)
    return AutoConfig.from_pretrained(folder)


def _shrunken(fields: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {
        name: _shrunken(value) if isinstance(value, dict) else value for name, value in fields.items()
    }
    for name, size in (*SIZES.items(), *dict.fromkeys(_EVERY, 2).items(), *dict.fromkeys(_FIRST, 1).items()):
        if isinstance(small.get(name), int) and not isinstance(small[name], bool):
            small[name] = min(small[name], size)
    if small.get("kv_lora_rank"):  # latent attention has a key for each query
        small["num_key_value_heads"] = small.get("num_attention_heads")
        small["head_dim"] = small.get("qk_rope_head_dim")
        small["qk_head_dim"] = small.get("qk_nope_head_dim", 0) + small.get("qk_rope_head_dim", 0)
    if isinstance(small.get("mamba_n_heads"), int):
        small["mamba_d_head"] = small["hidden_size"] * small.get("mamba_expand", 2) // small["mamba_n_heads"]
        small["mamba_d_ssm"] = small["mamba_n_heads"] * small["mamba_d_head"]
    vocabulary = small.get("vocab_size")
    for name, value in small.items():
        if str(name).endswith("_token_id") and isinstance(vocabulary, int):
            small[name] = _within(value, vocabulary)
    _keep_layers(small)
    _shrink_rotations(small)
    return small


def _within(tokens: Any, vocabulary: int) -> Any:
    """Token ids below the size of a vocabulary: the last ones in place of those that are not."""
    if isinstance(tokens, list):
        return sorted({_within(token, vocabulary) for token in tokens})
    if not isinstance(tokens, int):
        return tokens
    return tokens if tokens < vocabulary else vocabulary - 1 - tokens % _SPECIAL


def _shrink_rotations(fields: dict[str, Any]) -> None:
    """Divide the dimensions that rotate among the kinds of positions (`mrope_section`) as before."""
    rope, heads = fields.get("rope_parameters"), fields.get("num_attention_heads")
    if not isinstance(rope, dict) or "mrope_section" not in rope or not isinstance(heads, int):
        return
    size = fields.get("head_dim") or fields["hidden_size"] // heads
    pairs = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
    before = rope["mrope_section"]
    sections = [max(1, pairs * section // sum(before)) for section in before]
    sections[0] += pairs - sum(sections)
    rope["mrope_section"] = sections


def _keep_layers(fields: dict[str, Any]) -> None:
    """Cut the number of layers, and lists with an entry per layer, to the first two layers of each kind."""
    name = next((name for name in LAYERS if isinstance(fields.get(name), int)), None)
    if name is None:
        return
    number = fields[name]
    lists = {key: value for key, value in fields.items() if isinstance(value, list) and len(value) == number}
    kinds = list(zip(*map(_hashable, lists.values()), strict=True)) if lists else [()] * number
    layers = [layer for layer, kind in enumerate(kinds) if kinds[:layer].count(kind) < 2][:8]
    for key, value in lists.items():
        fields[key] = [value[layer] for layer in layers]
    fields[name] = len(layers)


def _hashable(values: list[Any]) -> list[str]:
    return [repr(value) for value in values]
