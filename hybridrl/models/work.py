"""The work of a transformer for sequences of given lengths, by its configuration.

Only matrix products are counted. Micro-batches are balanced by `Work`, with attention as a causal kernel computes it.
The FLOPs of a pass are those that `torch.utils.flop_counter` counts: 2 for a multiplication and an addition, attention
over the whole square of a sequence's length, although a causal kernel may leave half of it out, and never across the
sequences of a packed row. Work that a setting adds, such as recomputed activations, is not counted, so the utilization
that follows is that of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

# Families whose products are exactly those below (`tests/models/test_models_work.py` compares). Those of others are an
# estimate: good enough to balance micro-batches, and not to report a utilization.
_COUNTED = (
    *("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"),
)
# Kinds of layers whose attention looks at a limited number of tokens. All others of these names look at every token.
_WINDOWED = ("sliding_attention", "chunked_attention")
_ATTENTION = ("full_attention", *_WINDOWED)
_NUMBERS_OF_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


@dataclass(frozen=True)
class Work:
    """Multiplications of a forward pass.

    Attributes:
        per_token: of the linear maps of all layers.
        per_pair: of attention, for each pair of a token and one that it attends to, by the size of the window; the
            window of layers without one is 0.
        per_output: of the output layer, for each token that is predicted.
        is_exact: whether these are the products of the model's family, and not an estimate.
    """

    per_token: int = 1
    per_pair: Mapping[int, int] = field(default_factory=dict)
    per_output: int = 0
    is_exact: bool = False

    def of(self, length: int) -> int:
        """The work for a sequence of `length` tokens with causal attention, without the output layer."""
        attention = sum(factor * pairs(length, window) for window, factor in self.per_pair.items())
        return self.per_token * length + attention

    def of_squares(self, lengths: Sequence[int], computed: Sequence[int] | None = None) -> int:
        """The work for sequences whose attention computes each pair within its window, also of later tokens.

        The output layer is left out.

        Args:
            lengths: tokens of each sequence.
            computed: how many of them are computed, which attend to the others as well; all by default.
        """
        computed = lengths if computed is None else computed
        attention = sum(
            factor * queries * min(length, window or length)
            for window, factor in self.per_pair.items()
            for length, queries in zip(lengths, computed, strict=True)
        )
        return self.per_token * sum(computed) + attention


def pairs(length: int, window: int = 0) -> int:
    """Pairs of causal attention over `length` tokens, each of which attends to at most `window` (0: no limit)."""
    inside = min(length, window or length)
    return inside * (inside + 1) // 2 + (length - inside) * inside


def work_of(config: PreTrainedConfig, value_model: bool = False) -> Work:
    """The work of a transformer with this configuration, whose MLPs are gated.

    Of a mixture of experts, the router and the experts that a token passes count.

    Args:
        value_model: the output layer is a value head.
    """
    text = config.get_text_config()
    layers = [text] * text.num_hidden_layers
    if getattr(text, "is_heterogeneous", False):  # layers have settings of their own (Gemma 4)
        layers = list(text.per_layer_config)
    kinds = getattr(text, "layer_types", None)
    kinds = kinds or ["sliding_attention"] * len(layers)  # older models have a window for all layers, or none
    per_token = sum(_projections(layer) + _mlp(layer, number) for number, layer in enumerate(layers))
    per_pair: dict[int, int] = {}
    for layer, kind in zip(layers, kinds, strict=False):
        if kind in _ATTENTION:
            size = _window(layer) if kind in _WINDOWED else 0
            per_pair[size] = per_pair.get(size, 0) + _of_a_pair(layer)
    return Work(
        per_token,
        per_pair,
        per_output=int(text.hidden_size * (1 if value_model else text.vocab_size)),
        is_exact=text.model_type in _COUNTED,
    )


def _window(layer: Any) -> int:
    """The window of a layer that has one; 0 for none."""
    if not getattr(layer, "use_sliding_window", True):
        return 0
    return getattr(layer, "sliding_window", None) or getattr(layer, "attention_chunk_size", None) or 0


def forward_flops(
    config: PreTrainedConfig, lengths: Sequence[int], predicted: int, value_model: bool = False
) -> float | None:
    """FLOPs of a forward pass.

    Args:
        config: a Hugging Face configuration.
        lengths: tokens of each sequence.
        predicted: tokens for which the output layer is computed.
        value_model: the output layer is a value head.

    Returns:
        The number, or None for a family whose products are not known here.
    """
    if config.get_text_config().model_type not in _COUNTED:
        return None
    work = work_of(config, value_model)
    return 2.0 * (predicted * work.per_output + work.of_squares(lengths))


def training_flops(
    config: PreTrainedConfig,
    lengths: Sequence[int],
    predicted: int,
    value_model: bool = False,
    frozen: bool = False,
) -> float | None:
    """FLOPs of a forward and a backward pass, which has twice the products of the forward pass; see `forward_flops`.

    Args:
        frozen: the weights have no gradients, as under an adapter: the backward pass has one product with each of them
            in place of two. The adapter's own products are not counted.
    """
    forward = forward_flops(config, lengths, predicted, value_model)
    if forward is None or not frozen:
        return None if forward is None else 3 * forward
    text = config.get_text_config()
    output = predicted * text.hidden_size * (1 if value_model else text.vocab_size)
    return 3 * forward - 2.0 * (output + work_of(config).per_token * sum(lengths))


def _head_dim(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _is_latent(text: Any) -> bool:
    return bool(getattr(text, "kv_lora_rank", None))


def _of_a_pair(text: Any) -> int:
    """Multiplications of a query with a key, and of a weight with a value, of all heads."""
    if _is_latent(text):
        return int(text.num_attention_heads * (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim))
    return 2 * int(text.num_attention_heads) * _head_dim(text)


def _projections(text: Any) -> int:
    if _is_latent(text):
        return _latent_projections(text)
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    return int(2 * text.hidden_size * _head_dim(text) * (heads + groups))


def _latent_projections(text: Any) -> int:
    heads, hidden, rope = text.num_attention_heads, text.hidden_size, text.qk_rope_head_dim
    of_query = heads * (text.qk_nope_head_dim + rope)
    query = hidden * text.q_lora_rank + text.q_lora_rank * of_query if text.q_lora_rank else hidden * of_query
    keys = hidden * (text.kv_lora_rank + rope)
    keys += text.kv_lora_rank * heads * (text.qk_nope_head_dim + text.v_head_dim)
    return int(query + keys + heads * text.v_head_dim * hidden)


def _mlp(text: Any, layer: int) -> int:
    """Multiplications per token in the MLP of a layer, or in its router and the experts that a token passes."""
    hidden, dense = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    dense = dense[layer] if isinstance(dense, Sequence) else dense
    experts_per_token = getattr(text, "num_experts_per_tok", None)
    if not experts_per_token or _is_dense(text, layer):
        return int(3 * hidden * dense)
    experts = next((count for name in _NUMBERS_OF_EXPERTS if (count := getattr(text, name, None))), 0)
    width = getattr(text, "moe_intermediate_size", None) or dense
    total = hidden * experts + 3 * hidden * width * (experts_per_token + (getattr(text, "n_shared_experts", None) or 0))
    if shared := getattr(text, "shared_expert_intermediate_size", None):
        total += 3 * hidden * shared + hidden  # and its gate
    return int(total)


def _is_dense(text: Any, layer: int) -> bool:
    """Whether a layer of a model with experts has none."""
    if layer in (getattr(text, "mlp_only_layers", None) or ()):
        return True
    if kinds := getattr(text, "mlp_layer_types", None):
        return bool(kinds[layer] == "dense")
    if layer < (getattr(text, "first_k_dense_replace", None) or 0):
        return True
    return bool((layer + 1) % (getattr(text, "decoder_sparse_step", None) or 1))
