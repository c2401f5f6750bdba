"""A tiny mixture of experts in place of a dense model's weights."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

LAYERS, EXPERTS, TOP_K = 2, 4, 2


def write_routed_model(folder: Path, scale: float = 4.0) -> Path:
    """Replace the model of a folder, which keeps its tokenizer.

    Args:
        scale: of its weights; the larger, the more it matters which experts a token uses, and the larger are rounding
            errors.
    """
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(folder)),
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=24,
    )
    model = Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(scale)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.save_pretrained(folder)
    return folder
