"""Rotary positions that `model.override_config` changes: what the model computes, and what engines are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises_with
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, Qwen2Config

from hybridrl.config import ModelConfig
from hybridrl.errors import ModelError
from hybridrl.models.info import engine_overrides
from hybridrl.models.model_config import load_model_config
from hybridrl.models.rope import check_length

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 100}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
BASE = 1e6
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rope")
    Qwen2Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": BASE}).save_pretrained(folder)
    return folder


def frequencies(config: Any) -> torch.Tensor:
    rotary: Any = AutoModelForCausalLM.from_config(config).model.rotary_emb
    return rotary.inv_freq


def written(folder: Path, rope: dict[str, Any]) -> torch.Tensor:
    """The frequencies of a model whose config.json says so itself."""
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = rope
    config.save_pretrained(folder / "written")
    return frequencies(AutoConfig.from_pretrained(folder / "written"))


@pytest.mark.parametrize(
    "override",
    [
        {"rope_parameters": YARN},
        {"rope_scaling": YARN},
        {"rope_scaling": {**{k: v for k, v in YARN.items() if k != "rope_type"}, "type": "yarn"}},
        {"rope_parameters": YARN, "max_position_embeddings": 256},
    ],
)
def test_scaling_acts_under_every_name_and_keeps_the_base(model: Path, override: dict[str, Any]) -> None:
    found = frequencies(load_model_config(model, override=override))
    torch.testing.assert_close(found, written(model, {**YARN, "rope_theta": BASE}))
    plain = frequencies(load_model_config(model))
    # The formula of linear interpolation holds at the lowest frequency, and the highest one stays.
    assert found[0] == plain[0] and found[-1] == pytest.approx(float(plain[-1]) / 4)
    # Engines replace a mapping, so they get the merged one; they get no attention implementation of the trainer.
    told = engine_overrides(ModelConfig(path=str(model), override_config={**override, "attn_implementation": "sdpa"}))
    assert told.pop("rope_parameters") == {**YARN, "rope_theta": BASE}
    assert told == {name: value for name, value in override.items() if not name.startswith("rope")}


def test_base_and_type_change_one_by_one(model: Path, tmp_path: Path) -> None:
    assert frequencies(load_model_config(model, override={"rope_theta": 10.0}))[-1] == pytest.approx(10 ** (-14 / 16))
    config = AutoConfig.from_pretrained(model)
    config.rope_parameters = {**YARN, "rope_theta": BASE}
    config.save_pretrained(tmp_path)
    linear = load_model_config(tmp_path, override={"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    assert linear.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": BASE}
    stronger = load_model_config(tmp_path, override={"rope_parameters": {"factor": 8.0}})
    assert stronger.rope_parameters == {**YARN, "factor": 8.0, "rope_theta": BASE}
    assert load_model_config(tmp_path, override={"rope_scaling": None}).rope_parameters["rope_type"] == "default"


def test_models_with_positions_for_each_kind_of_layer(tmp_path: Path) -> None:
    before = Gemma3TextConfig(**SIZES, head_dim=16)
    before.save_pretrained(tmp_path)
    full = {"rope_type": "linear", "factor": 8.0}
    after = load_model_config(tmp_path, override={"rope_parameters": {"full_attention": full}})
    assert after.rope_parameters["full_attention"] == {
        **full,
        "rope_theta": before.rope_parameters["full_attention"]["rope_theta"],
    }
    assert after.rope_parameters["sliding_attention"] == before.rope_parameters["sliding_attention"]
    with raises_with(ModelError, "rope_parameters", "rope_type", "full_attention"):
        load_model_config(tmp_path, override={"rope_parameters": full})


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ({"rope_parameters": {"rope_type": "yarm", "factor": 2.0}}, ("rope_type=yarm", "linear", "yarn")),
        ({"rope_parameters": {"rope_type": "yarn"}}, ("factor",)),
        ({"rope_parameters": {**YARN, "beta_fsat": 3}}, ("beta_fsat",)),
        ({"rope_scaling": 4.0}, ("scaling=4.0", "mapping")),
    ],
)
def test_what_would_be_ignored_or_fail_late_is_refused(
    model: Path, override: dict[str, Any], facts: tuple[str, ...]
) -> None:
    with raises_with(ModelError, "model.override_config.rope_", *facts):
        load_model_config(model, override=override)


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 64),
        ({"rope_type": "longrope", **FACTORS}, 16),
        ({"rope_type": "longrope", **FACTORS, "short_factor": [2.0] * 8}, None),
        (YARN, None),
        ({"rope_type": "linear", "factor": 2.0}, None),
    ],
)
def test_lengths_up_to_which_frequencies_are_fixed(model: Path, rope: dict[str, Any], limit: int | None) -> None:
    config = load_model_config(model, override={"rope_parameters": rope})
    for tokens in (limit or 64, 10**6):
        if limit is not None and tokens > limit:
            with raises_with(ModelError, f"{tokens} tokens", rope["rope_type"], f"{limit} tokens"):
                check_length(config, tokens, "rows")
        else:
            check_length(config, tokens, "rows")


def test_each_kind_of_layer_counts(tmp_path: Path) -> None:
    Gemma3TextConfig(**SIZES, head_dim=16).save_pretrained(tmp_path)
    full = {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}
    config = load_model_config(tmp_path, override={"rope_parameters": full})
    check_length(config, 64, "rows")
    with pytest.raises(ModelError, match="dynamic"):
        check_length(config, 65, "rows")
