"""How much computation a sequence takes, relative to others: a linear part per token, and attention's per pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

# Kinds of layers whose attention looks at a limited number of tokens. All others of these names look at every token.
_WINDOWED = ("sliding_attention", "chunked_attention")
_ATTENTION = ("full_attention", *_WINDOWED)


@dataclass(frozen=True)
class Work:
    """Multiplications of a forward pass, without the output layer.

    Attributes:
        per_token: of the linear maps of all layers.
        per_pair: of attention, for each pair of a token and one that it attends to, by the size of the window; the
            window of layers without one is 0.
    """

    per_token: int = 1
    per_pair: Mapping[int, int] = field(default_factory=dict)

    def of(self, length: int) -> int:
        """The work for a sequence of `length` tokens."""
        attention = sum(factor * pairs(length, window) for window, factor in self.per_pair.items())
        return self.per_token * length + attention


def pairs(length: int, window: int = 0) -> int:
    """Pairs of causal attention over `length` tokens, each of which attends to at most `window` (0: no limit)."""
    inside = min(length, window or length)
    return inside * (inside + 1) // 2 + (length - inside) * inside


def work_of(config: PreTrainedConfig) -> Work:
    """The work of a transformer with this configuration, whose MLPs are gated.

    Of a mixture of experts, the experts that a token passes count.
    """
    text = config.get_text_config()
    hidden, layers, heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
    head = getattr(text, "head_dim", None) or hidden // heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    projections = 2 * hidden * head * (heads + groups)
    named = getattr(text, "layer_types", None)
    kinds = named or ["sliding_attention"] * layers  # older models have a window for all layers, or none
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None) or 0
    if not getattr(text, "use_sliding_window", True):
        window = 0
    per_pair: dict[int, int] = {}
    for kind in kinds:
        if kind in _ATTENTION:
            size = window if kind in _WINDOWED else 0
            per_pair[size] = per_pair.get(size, 0) + 2 * heads * head
    return Work(layers * projections + sum(_mlp(text, layer) for layer in range(layers)), per_pair)


def _mlp(text: Any, layer: int) -> int:
    """Multiplications per token in the MLP or the experts of a layer."""
    hidden, dense = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    dense = dense[layer] if isinstance(dense, Sequence) else dense
    chosen = getattr(text, "num_experts_per_tok", None)
    if not chosen or layer in _dense_layers(text):
        return int(3 * hidden * dense)
    width = getattr(text, "moe_intermediate_size", None) or dense
    shared = getattr(text, "shared_expert_intermediate_size", None) or width * (
        getattr(text, "n_shared_experts", None) or 0
    )
    return int(3 * hidden * (chosen * width + shared))


def _dense_layers(text: Any) -> set[int]:
    named = set(getattr(text, "mlp_only_layers", None) or ())
    return named | set(range(getattr(text, "first_k_dense_replace", None) or 0))
