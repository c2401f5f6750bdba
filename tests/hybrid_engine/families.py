"""A tiny model of each family, in the shapes that need care: odd vocabularies, shared KV heads, tied heads, experts."""

from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SIZES = {
    "vocab_size": 250,  # padded to 256 by engines
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,  # one head for two ranks
}
LATENT = {
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",  # as in the configurations of published models; vLLM reads it
    # as there, too; SGLang reads them
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    | {"original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
}
FAMILIES: dict[str, PreTrainedConfig] = {
    # first, because vLLM makes the group of expert parallelism for such a model only
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2, head_dim=32),
    "deepseek": DeepseekV3Config(**{**SIZES, **LATENT}),
    "llama": LlamaConfig(**{**SIZES, "num_key_value_heads": 2}),
    "mistral": MistralConfig(**SIZES, head_dim=32),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "gemma": GemmaConfig(**SIZES, head_dim=32),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=32, sliding_window=32),
}
