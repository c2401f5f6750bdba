"""What a sequence costs, against PyTorch's own count of the operations of a forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from hybridrl.models.work import pairs, work_of

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        Qwen2Config(**{**SIZES, "hidden_size": 64}),
        Gemma2Config(**SIZES, sliding_window=8),
    ],
    ids=lambda config: config.model_type,
)
def test_work_counts_what_a_forward_pass_multiplies(config: PreTrainedConfig) -> None:
    """PyTorch counts two operations per multiplication, and eager attention computes all pairs, masked or not."""
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    work = work_of(config)
    for length in (5, 33):
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            model(torch.zeros(1, length, dtype=torch.int64), use_cache=False)
        head = SIZES["vocab_size"] * config.hidden_size * length
        square = length**2 * sum(work.per_pair.values())
        assert counted.get_total_flops() / 2 - head == pytest.approx(work.per_token * length + square)


def test_the_experts_of_a_token_count() -> None:
    config = Qwen3MoeConfig(**SIZES, **MOE)
    projections = 4 * 2 * 48 * 16 * (4 + 2)
    assert work_of(config).per_token == projections + 3 * 48 * (80 + 3 * 2 * 24)


def test_windows_are_counted_by_layer() -> None:
    config = Gemma2Config(**SIZES, sliding_window=8)
    assert config.layer_types.count("sliding_attention") == 2
    assert work_of(config).per_pair == {8: 2 * 2 * 64, 0: 2 * 2 * 64}
    for length, window in [(20, 8), (8, 8), (5, 8), (20, 0)]:
        attended = sum(min(token + 1, window or token + 1) for token in range(length))
        assert pairs(length, window) == attended
    work = work_of(config)
    assert work.of(20) == 20 * work.per_token + 256 * (pairs(20, 8) + 210)
