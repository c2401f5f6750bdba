"""What sequences cost: FLOPs by family against PyTorch's own counter, forward and backward, and causal attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma2Config, Qwen3MoeConfig

from hybridrl.models.work import Work, forward_flops, pairs, training_flops, work_of
from hybridrl.utils.device import peak_tflops

SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "experts_implementation": "eager"}
LATENT = {"q_lora_rank": 20, "kv_lora_rank": 16, "v_head_dim": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "num_key_value_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Gemma": {"head_dim": 20},
    "Gemma2": {"head_dim": 20, "sliding_window": 1000},
    "Gemma3": {"head_dim": 20, "sliding_window": 1000},
    "Mistral": {"sliding_window": None},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    "Qwen2Moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    "Qwen3Moe": {**MOE, "num_experts": 4, "head_dim": 16, "mlp_only_layers": [1]},
    "DeepseekV3": {**MOE, **LATENT, **ROUTED, "first_k_dense_replace": 1},
    "DeepseekV2": {**MOE, **LATENT, **ROUTED, "first_k_dense_replace": 1, "q_lora_rank": None},
}
LENGTHS = (7, 40, 19)


def _counted(model: torch.nn.Module) -> tuple[int, int]:
    """FLOPs of the forward and of both passes, one sequence at a time: so a packed row has to be counted."""
    totals = []
    for backward in (False, True):
        with FlopCounterMode(display=False) as counter:
            for length in LENGTHS:
                logits = model(input_ids=torch.arange(length)[None] % 211, use_cache=False).logits
                if backward:
                    logits.sum().backward()
        totals.append(counter.get_total_flops())
    return totals[0], totals[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_of_torchs_counter(family: str) -> None:
    kind = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, kind)(**{**SIZES, **FAMILIES[family]})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    forward, both = _counted(model)
    # The counter also sees the products that make the angles of position embeddings, which are no part of the model.
    assert forward_flops(config, LENGTHS, sum(LENGTHS)) == pytest.approx(forward, rel=2e-3)
    assert training_flops(config, LENGTHS, sum(LENGTHS)) == pytest.approx(both, rel=2e-3)


def test_frozen_weights_have_no_gradients_to_count() -> None:
    """As under an adapter, whose own products are not counted."""
    config = transformers.Qwen3Config(**SIZES)
    model = transformers.Qwen3ForCausalLM(config).requires_grad_(False)
    model.enable_input_require_grads()
    _, both = _counted(model)
    assert training_flops(config, LENGTHS, sum(LENGTHS), frozen=True) == pytest.approx(both, rel=2e-3)


def test_the_quadratic_part_is_of_each_sequence_and_the_output_layer_of_predicted_tokens() -> None:
    config = transformers.Qwen2Config(**SIZES)
    apart, together = forward_flops(config, [64, 64], 10), forward_flops(config, [128], 10)
    assert apart is not None and together is not None
    assert together - apart == 3 * 4 * 48 * (128**2 - 2 * 64**2)  # layers x (2 products x 2) x width x pairs
    less = forward_flops(config, [128], 4)
    assert less is not None and together - less == 2 * 6 * 48 * 211
    value = forward_flops(config, [128], 10, value_model=True)
    assert value is not None and together - value == 2 * 10 * 48 * 210


def test_a_sliding_window_bounds_the_quadratic_part_of_its_layers() -> None:
    sizes = {**SIZES, "head_dim": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    wide, narrow = (
        forward_flops(transformers.Gemma2Config(**sizes, sliding_window=window), [100], 1) for window in (1000, 10)
    )
    assert wide is not None and narrow is not None
    assert wide - narrow == 2 * 4 * 48 * (100 * 100 - 100 * 10)


def test_tokens_that_were_computed_with_another_row_cost_nothing() -> None:
    """Each of the others attends to all tokens of its row, within the window."""
    work = Work(per_token=5, per_pair={0: 2, 4: 3})
    assert work.of_squares([10, 3], [10, 3]) == work.of_squares([10, 3])
    assert work.of_squares([10, 3], [6, 0]) == 5 * 6 + 2 * 6 * 10 + 3 * 6 * 4


def test_an_unknown_family_is_not_guessed() -> None:
    assert forward_flops(transformers.GPT2Config(), [10], 10) is None
    assert not work_of(transformers.GPT2Config()).is_exact and work_of(transformers.Qwen2Config(**SIZES)).is_exact


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 311.9),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GB200", 2250.0),
        ("cpu", None),
        ("Tesla K80", None),
    ],
)
def test_the_peak_of_a_device_is_found_by_its_name(name: str, tflops: float | None) -> None:
    assert peak_tflops(name) == tflops


def test_the_router_and_the_experts_of_a_token_count() -> None:
    config = Qwen3MoeConfig(**{**SIZES, **FAMILIES["Qwen3Moe"]})
    projections = 3 * 2 * 48 * 16 * (4 + 2)
    assert work_of(config).per_token == projections + 3 * 48 * (80 + 2 * 2 * 24) + 2 * 48 * 4


def test_windows_are_counted_by_layer() -> None:
    config = Gemma2Config(**{**SIZES, "num_hidden_layers": 4, "head_dim": 16}, sliding_window=8)
    assert config.layer_types.count("sliding_attention") == 2
    assert work_of(config).per_pair == {8: 2 * 2 * 64, 0: 2 * 2 * 64}
    for length, window in [(20, 8), (8, 8), (5, 8), (20, 0)]:
        attended = sum(min(token + 1, window or token + 1) for token in range(length))
        assert pairs(length, window) == attended
    work = work_of(config)
    assert work.of(20) == 20 * work.per_token + 256 * (pairs(20, 8) + 210)


def test_layers_with_settings_of_their_own_are_counted_with_them() -> None:
    """Full attention of Gemma 4 has larger heads than that with a window, and other keys and values."""
    sizes = {**SIZES, "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 8}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = transformers.Gemma4TextConfig(**sizes, layer_types=kinds, global_head_dim=32)
    work = work_of(config)
    assert work.per_pair == {8: 2 * 2 * 4 * 16, 0: 2 * 4 * 32}
    assert work.per_token == 2 * 48 * 16 * (4 + 2) * 2 + 2 * 48 * 32 * (4 + 2) + 3 * 3 * 48 * 80


def test_the_work_of_an_unknown_family_is_an_estimate() -> None:
    assert work_of(transformers.GPT2Config()).per_token == 12 * (4 * 768**2 + 3 * 768 * 3072)
