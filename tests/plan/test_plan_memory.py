"""Memory in closed form: the forecast that counts allocations, and peaks that were measured on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridrl.config import load_config
from hybridrl.forecast.ppo_run import forecast_run
from hybridrl.plan.model_bytes import model_memory
from hybridrl.plan.published import read_models
from hybridrl.plan.seconds import StepSize, TrainingLayout
from hybridrl.plan.shapes import read_shape

MODELS = read_models(Path(__file__).with_name("public_models.json"))
GIB = 1024**3
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1536,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "moe_intermediate_size": 512,
    "head_dim": 64,
}
PROMPT, RESPONSE = 512, 1536  # a row of both is a micro-batch: on a CPU, a larger one would have one row, too


@pytest.mark.slow(40)
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize(
    "facts",
    [
        QWEN2,
        {**QWEN2, "num_hidden_layers": 8, "tie_word_embeddings": True},
        {**QWEN2, "num_key_value_heads": 8, "intermediate_size": 2560},
        {**MIXTURE, "num_experts_per_tok": 2},
        {**MIXTURE, "num_experts_per_tok": 4},
    ],
    ids=["dense", "deep and tied", "wide", "2 experts", "4 experts"],
)
def test_it_is_within_10_percent_of_the_counted_allocations(
    facts: dict[str, Any], checkpointing: bool, ranks: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **facts}), encoding="utf-8")
    words = {
        "actor_rollout_ref.model.path": tmp_path,
        "actor_rollout_ref.model.enable_gradient_checkpointing": checkpointing,
        "actor_rollout_ref.model.share_prefixes": False,
        "actor_rollout_ref.actor.fsdp_config.dtype": "bfloat16",
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": PROMPT + RESPONSE,
        "algorithm.adv_estimator": "grpo",
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": RESPONSE,
        "trainer.n_gpus_per_node": ranks,
    }
    config: Any = load_config("ppo_trainer", [f"{key}={value}" for key, value in words.items()])
    counted = forecast_run(config).roles["actor_rollout"]
    assert counted is not None
    layout = TrainingLayout(True, shards=ranks, micro_tokens=PROMPT + RESPONSE, recompute=int(checkpointing))
    step = StepSize(64, 1, PROMPT, RESPONSE, RESPONSE, 1, PROMPT + RESPONSE)
    terms = model_memory(read_shape(str(tmp_path)), ranks, layout, step, True)
    assert float(terms.update) == pytest.approx(counted.update, rel=0.1)
    assert float(terms.pass_peak) == pytest.approx(counted.without_gradients, rel=0.1)
    assert float(terms.resident) == pytest.approx(counted.resident, rel=0.01)


@pytest.mark.parametrize(
    ("model", "recompute", "fused", "measured"),
    [
        ("qwen2.5-0.5b", 1, 0, 13.4),
        ("qwen2.5-1.5b", 1, 0, 31.9),
        ("qwen2.5-0.5b", 0, 0, 35.0),
        ("qwen2.5-0.5b", 0, 1, 31.5),
    ],
)
def test_it_is_within_5_percent_of_peaks_on_an_h200(model: str, recompute: int, fused: int, measured: float) -> None:
    """GiB of updates with micro-batches of 16,384 tokens, all of which are predicted (docs/sizing.md)."""
    layout = TrainingLayout(True, micro_tokens=16384, recompute=recompute, fused=fused)
    terms = model_memory(MODELS[model], 1, layout, StepSize(16, 1, 0, 4096, 4096, 1, 4096), True)
    assert float(terms.update) / GIB == pytest.approx(measured, rel=0.05)


def test_megatron_splits_weights_and_optimizer_as_its_layout_says() -> None:
    """Of 64 ranks with t = 4, p = 2, e = 8: dense weights in 8 parts, experts in 16, states over what is left."""
    shape = MODELS["qwen3-30b-a3b"]
    layout = TrainingLayout(False, tensor=4, pipeline=2, expert=8, micro_tokens=16384)
    step = StepSize(64, 1, 1024, 8192, 8192, 1, 9216)
    ends, experts = 2 * shape.embedding, shape.expert_parameters
    dense = (shape.parameters - ends - experts) / 8 + ends / 4 / 2
    local = dense + experts / 16
    states = 12 * (dense / 8 + experts / 16 / 4)
    terms = model_memory(shape, 64, layout, step, True)
    assert float(terms.resident) == pytest.approx(2 * local + states + 4 * local)


def test_more_shards_and_offload_take_less() -> None:
    step = StepSize(64, 1, 1024, 8192, 8192, 1, 9216)
    table = TrainingLayout(
        True,
        **{name: np.array([1] * 4) for name in ("tensor", "context", "expert", "pipeline", "recompute")},
        fused=np.array([0] * 4),
        shards=np.array([8, 64, 64, 64]),
        micro_tokens=np.array([16384] * 4),
        offload=np.array([0, 0, 1, 2]),
    )
    terms = model_memory(MODELS["qwen2.5-7b"], 64, table, step, True)
    assert list(terms.resident) == sorted(terms.resident, reverse=True) and terms.resident[3] == 0
    assert terms.update[0] > terms.update[1] == terms.update[2] == terms.update[3]


def test_divided_experts_are_gathered_in_part() -> None:
    """Of 64 ranks with 8 groups of experts, a rank gathers an eighth of a layer's; the vocabulary is larger then."""
    shape, step = MODELS["qwen3-30b-a3b"], StepSize(64, 1, 1024, 8192, 8192, 1, 9216)
    apart, whole = (
        model_memory(shape, 64, TrainingLayout(True, shards=64, expert=size, micro_tokens=16384), step, True)
        for size in (8, 1)
    )
    layer = (shape.parameters - 2 * shape.embedding) / shape.layers
    assert layer - shape.expert_parameters / shape.layers * 7 / 8 < shape.embedding < layer
    # Two units and a buffer in bfloat16, and gradients that are reduced in bfloat16 and float32.
    assert float(whole.update - apart.update) == pytest.approx((2 * 3 + 6) * (layer - shape.embedding))
    assert apart.resident == whole.resident
