"""The sizes of a transformer, read from its config.json alone, and what follows from them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridrl.errors import ModelError

_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-latent attention (DeepSeek-V2 and V3).

    Attributes:
        query_rank: rank of the queries' compression; 0: none.
        value_rank: rank of the compressed keys and values, which are cached.
        plain, rotary, value: sizes per head without positions, with rotary positions, and of values.
    """

    query_rank: int
    value_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        family: `model_type` of its config.json.
        layers, hidden, heads, kv_heads, head_dim, ffn, vocabulary: as everywhere; `ffn` is that of dense layers.
        experts, experts_per_token, expert_ffn: of a mixture of experts; 0 for a dense model.
        shared_ffn: width of the experts that every token passes.
        dense_layers: layers without experts in such a model.
        latent: multi-latent attention, if the model has it.
        attending: share of layers whose attention has keys and values (others have a state of constant size).
        tied: whether the output layer is the embedding.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    latent: LatentAttention | None = None
    attending: float = 1.0
    tied: bool = False

    @property
    def attention(self) -> int:
        """Weights of a layer's attention."""
        if self.latent is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        latent, h = self.latent, self.hidden
        per_query = self.heads * (latent.plain + latent.rotary)
        query = h * latent.query_rank + latent.query_rank * per_query if latent.query_rank else h * per_query
        keys = h * (latent.value_rank + latent.rotary)
        keys += latent.value_rank * self.heads * (latent.plain + latent.value)
        return query + keys + self.heads * latent.value * h

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def _outside_experts(self) -> int:
        """Weights of all layers without routed experts."""
        dense = (self.layers - self.expert_layers) * 3 * self.hidden * self.ffn
        routing = self.hidden * self.experts + 3 * self.hidden * self.shared_ffn
        return self.layers * self.attention + dense + self.expert_layers * routing

    @property
    def expert_parameters(self) -> int:
        """Weights of the routed experts."""
        return self.expert_layers * self.experts * 3 * self.hidden * self.expert_ffn

    @property
    def embedding(self) -> int:
        """Weights of the embedding, which are also those of an output layer."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Weights of the model without norms and biases: layers, experts, embedding and output layer."""
        return self._outside_experts + self.expert_parameters + self.embedding * (1 if self.tied else 2)

    @property
    def active(self) -> int:
        """Weights of the layers that a token passes, without embedding and output layer."""
        experts = self.expert_layers * self.experts_per_token * 3 * self.hidden * self.expert_ffn
        return self._outside_experts + experts

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values per token in bfloat16, on all devices of a replica together."""
        elements = 2 * self.kv_heads * self.head_dim
        if self.latent is not None:
            elements = self.latent.value_rank + self.latent.rotary
        return 2 * self.layers * self.attending * elements

    def kv_shards(self, tensor_parallel: int) -> int:
        """Devices of a replica among which keys and values are split; latent ones are on each of them."""
        return 1 if self.latent is not None else min(tensor_parallel, self.kv_heads)

    def read_bytes(self, tokens: Any) -> Any:
        """Bytes of weights in bfloat16 that a pass over `tokens` tokens reads: of E experts, E (1 - (1 - k/E)^tokens)
        are met by at least one token that chooses k of them."""
        expected: Any = 0
        if self.experts:
            missed = (1 - self.experts_per_token / self.experts) ** np.asarray(tokens, dtype=float)
            expected = self.expert_layers * self.experts * (1 - missed) * 3 * self.hidden * self.expert_ffn
        return 2 * (self._outside_experts + expected + self.embedding)

    def forward_flops(self, tokens: Any, length: float) -> Any:
        """FLOPs of a forward pass: 2 per weight and token, and causal attention over sequences of `length`."""
        per_pair = 2 * self.heads * 2 * self.head_dim
        if self.latent is not None:
            per_pair = 2 * self.heads * (self.latent.plain + self.latent.rotary + self.latent.value)
        pairs = per_pair * self.layers * self.attending * length / 2
        return tokens * (2 * (self.active + self.embedding) + pairs)


def shape_of(facts: Mapping[str, Any]) -> ModelShape:
    """Return the sizes that the entries of a config.json state.

    Raises:
        ModelError: an entry that is needed is missing.
    """
    text = {**facts, **(facts.get("text_config") or {})}
    try:
        layers, hidden, heads = (int(text[k]) for k in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        vocabulary, experts = int(text["vocab_size"]), int(next((text[k] for k in _EXPERTS if text.get(k)), 0))
        expert_ffn = int(text.get("moe_intermediate_size") or text["intermediate_size"]) if experts else 0
        ffn = int(text["intermediate_size"] if text.get("intermediate_size") else expert_ffn)
        per_token = int(text["num_experts_per_tok"]) if experts else 0
    except KeyError as error:
        raise ModelError(
            f"config.json of the model has no entry {error.args[0]}, which a plan needs; name a model whose "
            "config.json has the sizes of a decoder"
        ) from error
    kinds = text.get("layer_types") or []
    shared = int(text.get("shared_expert_intermediate_size") or 0)
    return ModelShape(
        family=str(text.get("model_type", "unknown")),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        ffn=ffn,
        vocabulary=vocabulary,
        experts=experts,
        experts_per_token=per_token,
        expert_ffn=expert_ffn,
        shared_ffn=(shared or int(text.get("n_shared_experts") or 0) * expert_ffn) if experts else 0,
        dense_layers=_dense_layers(text, layers) if experts else 0,
        latent=_latent(text),
        attending=sum(kind in _ATTENTION for kind in kinds) / len(kinds) if kinds else 1.0,
        tied=bool(facts.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
    )


def read_shape(path: str) -> ModelShape:
    """Return the sizes of the model in a folder; its weights need not be there.

    Raises:
        ModelError: the folder has no config.json that can be read.
    """
    file = Path(path).expanduser() / "config.json"
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model path {path or '(not set)'}: {file} cannot be read ({error}); a plan needs a folder with the "
            "model's config.json, and no weights"
        ) from error
    return shape_of(facts)


def _dense_layers(text: Mapping[str, Any], layers: int) -> int:
    if kinds := text.get("mlp_layer_types"):
        return sum(kind == "dense" for kind in kinds)
    first, step = int(text.get("first_k_dense_replace") or 0), int(text.get("decoder_sparse_step") or 1)
    only = set(text.get("mlp_only_layers") or ())
    return sum(layer < first or layer in only or (layer + 1) % step != 0 for layer in range(layers))


def _latent(text: Mapping[str, Any]) -> LatentAttention | None:
    if not text.get("kv_lora_rank"):
        return None
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return LatentAttention(
        int(text.get("q_lora_rank") or 0), int(text["kv_lora_rank"]), *(int(text[name]) for name in names)
    )
