"""Engines on Megatron-core for tests: settings in short form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hybridrl.config.schema.engine import OptimConfig
from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import create_train_engine

_KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def make_megatron(
    path: Path,
    model_type: str = "language_model",
    optim: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **engine: Any,
) -> Any:
    """The counterpart of `make_engine` on Megatron-core; `tp=2` stands for `tensor_model_parallel_size=2`."""
    settings = {
        "lr": 1e-2,
        "clip_grad": 0.5,
        "lr_warmup_steps": 2,
        "lr_scheduler_type": "linear",
        "total_training_steps": 8,
    }
    made = create_train_engine(
        model_type,
        "megatron",
        model=ModelConfig(path=str(path), **(model or {})),
        engine=MegatronConfig(**{_KEYS.get(name, name): value for name, value in engine.items()}),
        optim=OptimConfig(**{**settings, **(optim or {})}),
    )
    made.initialize()
    return made


def save_model(folder: Path, name: str, vocabulary: int = 263) -> None:
    """Four layers, so that they divide into two stages of two chunks; the vocabulary is odd. All weights are random."""
    torch.manual_seed(3)
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": name == "tied",
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    model: Any
    if name == "experts":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True))
    elif name == "latent":
        latents = {"q_lora_rank": 24, "kv_lora_rank": 16, "v_head_dim": 12}
        heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "num_key_value_heads": 4}
        routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        routed |= {"moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1}
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**sizes, **latents, **heads, **routed}))
    elif name == "critic":
        model = Qwen2ForTokenClassification(Qwen2Config(**sizes, num_labels=1))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
