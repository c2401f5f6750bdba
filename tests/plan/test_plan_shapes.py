"""Sizes from config.json: parameters as model cards and transformers count them; devices and lengths."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.errors import ModelError, PlacementError
from hybridrl.plan.devices import DEVICES, read_devices
from hybridrl.plan.lengths import quantiles
from hybridrl.plan.published import read_models
from hybridrl.plan.shapes import read_shape, shape_of

MODELS = Path(__file__).with_name("public_models.json")
#: parameters in 1e9, in all and active per token, as the model cards say
CARDS = {
    "qwen2.5-0.5b": (0.494, None),
    "qwen2.5-7b": (7.616, None),
    "llama3.1-8b": (8.03, None),
    "llama3-70b": (70.55, None),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235.0, 22.0),
    "deepseek-v3": (671.0, 37.0),
}
SMALL = {
    "qwen2": {},
    "llama": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 2,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}


@pytest.mark.parametrize("name", CARDS)
def test_parameters_are_those_of_the_model_card(name: str) -> None:
    shape, (total, active) = read_models(MODELS)[name], CARDS[name]
    assert shape.parameters == pytest.approx(total * 1e9, rel=2e-3)
    if active is not None:
        assert shape.active + 2 * shape.embedding == pytest.approx(active * 1e9, rel=0.025)


@pytest.mark.parametrize("family", SMALL)
def test_parameters_are_those_that_transformers_builds(family: str, tmp_path: Path) -> None:
    facts = {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if family == "deepseek_v3" else 2,
        "intermediate_size": 96,
        "vocab_size": 512,
        "tie_word_embeddings": False,
        **SMALL[family],
    }
    config = AutoConfig.for_model(family, **facts)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
    gates = 64 * shape.expert_layers if (shape := read_shape(str(tmp_path))).shared_ffn and family == "qwen2_moe" else 0
    assert shape.parameters == matrices - gates
    assert shape.family == family


def test_nested_text_and_hybrid_layers() -> None:
    text = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 512,
        "layer_types": ["full_attention", "linear_attention"] * 2,
    }
    shape = shape_of({"text_config": text, "tie_word_embeddings": True})
    assert shape.kv_bytes == 2 * 2 * (2 * 2 * 16), "two of four layers have keys and values"
    assert shape.tied


def test_a_config_without_sizes_is_refused_by_the_entry(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as without:
        read_shape(str(tmp_path))
    assert str(tmp_path) in str(without.value)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(ModelError) as missing:
        read_shape(str(tmp_path))
    assert "num_hidden_layers" in str(missing.value)


def test_devices_are_read_and_an_unknown_one_is_named_with_the_nearest() -> None:
    cluster = read_devices("64xh100")
    assert (cluster.device, cluster.count, cluster.machine, cluster.machines) == (DEVICES["H100"], 64, 8, 8)
    assert cluster.sizes == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert [cluster.shape_of(size) for size in (4, 24)] == [[4], [8, 8, 8]]
    assert read_devices("4xH100").machine == 4 and read_devices("72xGB200").machine == 4
    with pytest.raises(PlacementError) as unknown:
        read_devices("8xH1000")
    assert "H1000" in str(unknown.value) and "nearest: H100" in str(unknown.value)
    for text, machine in (("H100", None), ("0xH100", None), ("12xH100", 8)):
        with pytest.raises(PlacementError) as wrong:
            read_devices(text, machine)
        assert f"devices={text}" in str(wrong.value)


def test_every_data_sheet_has_a_source() -> None:
    assert all(sheet.source and sheet.name == name for name, sheet in DEVICES.items())


@given(st.integers(10, 4000), st.integers(1, 8), st.sampled_from([0.3, 0.8, 1.3]))
def test_lengths_have_the_mean_and_the_limit(mean: int, times: int, sigma: float) -> None:
    most = round(mean * (1.2 + times))
    values = quantiles(mean, most, sigma)
    assert values.mean() == pytest.approx(mean, rel=0.01)
    assert values.max() <= most and (np.diff(values) >= 0).all()
