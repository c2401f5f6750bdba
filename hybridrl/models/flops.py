"""Counts the floating-point operations that a model needs for sequences of given lengths, by its configuration.

Counted are the matrix products (2 for a multiplication and an addition), as `torch.utils.flop_counter` counts them:
attention over the whole square of a sequence's length, although a causal kernel may leave half of it out, and never
across the sequences of a packed row. Work that a setting adds, such as recomputed activations, is not counted, so the
utilization that follows from these numbers is that of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: Per token and layer, of one layer's part: (configuration, number of the layer) -> FLOPs.
_PerToken = Callable[[Any, int], float]

_DENSE = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")
_LATENT = ("deepseek_v2", "deepseek_v3")


def training_flops(config: Any, lengths: Sequence[int], predicted: int, value_model: bool = False) -> float | None:
    """FLOPs of a forward and a backward pass; the backward pass has twice the products of the forward pass.

    Args:
        config: a Hugging Face configuration.
        lengths: tokens of each sequence.
        predicted: tokens for which the output layer is computed.
        value_model: the output layer is a value head.

    Returns:
        The number, or None for a family whose products are not known here.
    """
    forward = forward_flops(config, lengths, predicted, value_model)
    return None if forward is None else 3 * forward


def forward_flops(config: Any, lengths: Sequence[int], predicted: int, value_model: bool = False) -> float | None:
    """FLOPs of a forward pass; see `training_flops`."""
    text = config.get_text_config()
    layer = _layer_of(text.model_type)
    if layer is None:
        return None
    tokens = sum(lengths)
    total = 2.0 * predicted * text.hidden_size * (1 if value_model else text.vocab_size)
    for number in range(text.num_hidden_layers):
        width = _score_width(text)
        reach = _window(text, number)
        scores = sum(length * min(length, reach or length) for length in lengths)
        total += tokens * layer(text, number) + 2.0 * scores * width
    return total


def _layer_of(model_type: str) -> _PerToken | None:
    if model_type in _DENSE:
        return lambda text, _: _attention(text) + _gated(text, text.intermediate_size)
    if model_type in _EXPERTS:
        return lambda text, number: _attention(text) + _experts(text, number)
    if model_type in _LATENT:
        return lambda text, number: _latent_attention(text) + _experts(text, number)
    return None


def _head_dim(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _score_width(text: Any) -> int:
    """Multiplications per pair of tokens: of queries with keys, and of weights with values."""
    if text.model_type in _LATENT:
        return int(text.num_attention_heads * (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim))
    return 2 * text.num_attention_heads * _head_dim(text)


def _window(text: Any, number: int) -> int | None:
    """Tokens that a layer's attention reaches; None: all."""
    window = getattr(text, "sliding_window", None)
    if not window or getattr(text, "use_sliding_window", True) is False:
        return None
    kinds = getattr(text, "layer_types", None)
    return window if kinds is None or kinds[number] == "sliding_attention" else None


def _attention(text: Any) -> float:
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads or text.num_attention_heads
    return 2.0 * text.hidden_size * _head_dim(text) * 2 * (heads + kv_heads)


def _latent_attention(text: Any) -> float:
    heads, hidden, rope = text.num_attention_heads, text.hidden_size, text.qk_rope_head_dim
    of_query = heads * (text.qk_nope_head_dim + rope)
    query = hidden * text.q_lora_rank + text.q_lora_rank * of_query if text.q_lora_rank else hidden * of_query
    keys = hidden * (text.kv_lora_rank + rope)
    keys += text.kv_lora_rank * heads * (text.qk_nope_head_dim + text.v_head_dim)
    return 2.0 * (query + keys + heads * text.v_head_dim * hidden)


def _gated(text: Any, width: int) -> float:
    return 2.0 * 3 * text.hidden_size * width


def _experts(text: Any, number: int) -> float:
    """The feed-forward part of a layer with experts: the router, the chosen experts, and those that are shared."""
    if _is_dense(text, number):
        return _gated(text, text.intermediate_size)
    count = next(getattr(text, name) for name in ("n_routed_experts", "num_local_experts", "num_experts")
                 if getattr(text, name, None))  # fmt: skip
    width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    total = 2.0 * text.hidden_size * count + text.num_experts_per_tok * _gated(text, width)
    total += _gated(text, width) * (getattr(text, "n_shared_experts", None) or 0)
    if shared := getattr(text, "shared_expert_intermediate_size", None):
        total += _gated(text, shared) + 2.0 * text.hidden_size  # and its gate
    return total


def _is_dense(text: Any, number: int) -> bool:
    """Whether a layer of a model with experts has none."""
    if number in (getattr(text, "mlp_only_layers", None) or ()):
        return True
    if kinds := getattr(text, "mlp_layer_types", None):
        return bool(kinds[number] == "dense")
    if number < (getattr(text, "first_k_dense_replace", None) or 0):
        return True
    return bool((number + 1) % (getattr(text, "decoder_sparse_step", None) or 1))
