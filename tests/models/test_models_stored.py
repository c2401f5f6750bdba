"""Weights that are read from their files one layer at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from raising import raises_with
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig
from transformers.core_model_loading import MergeModulelist

from hybridrl.errors import ModelError
from hybridrl.models.loading import load_language_model
from hybridrl.models.model_config import load_model_config
from hybridrl.models.stored import named_tensors, open_language_model
from hybridrl.models.value import ValueModel, open_value_model, save_value_model

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
}


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


def experts(folder: Path) -> Path:
    config = Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def same_as_loaded(folder: Path) -> None:
    config = load_model_config(folder)
    whole = dict(named_tensors(load_language_model(folder, config, "auto")))
    found = dict(open_language_model(folder, config, "auto").tensors())
    assert found.keys() == whole.keys()
    for name, tensor in found.items():
        assert tensor.dtype is whole[name].dtype
        assert torch.equal(tensor, whole[name])


def test_tied_weights(tied: Path) -> None:
    file = tied / "model.safetensors"
    once = load_file(file)
    embedding = once["model.embed_tokens.weight"]
    assert "lm_head.weight" not in once
    same_as_loaded(tied)
    under_the_other_name = {**once, "lm_head.weight": embedding.clone()}
    save_file(under_the_other_name, file, metadata={"format": "pt"})  # both names, the same values
    same_as_loaded(tied)
    del under_the_other_name["model.embed_tokens.weight"]
    save_file(under_the_other_name, file, metadata={"format": "pt"})
    same_as_loaded(tied)
    save_file({**once, "lm_head.weight": embedding + 1}, file, metadata={"format": "pt"})
    found = dict(open_language_model(tied, load_model_config(tied), "auto").tensors())
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"] + 1)


def test_other_formats(tied: Path) -> None:
    """A file of PyTorch's own format, and dtypes that differ within a checkpoint and from the configuration."""
    weights = load_file(tied / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].half()
    save_file(weights, tied / "model.safetensors", metadata={"format": "pt"})
    same_as_loaded(tied)
    (tied / "model.safetensors").unlink()
    torch.save(weights, tied / "pytorch_model.bin")
    same_as_loaded(tied)


def test_conversions_that_need_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose conversion does not work without values is loaded as a whole."""
    folder = experts(tmp_path / "experts")
    merge = MergeModulelist.convert

    def needs_values(self, tensors, *arguments, **options):  # type: ignore[no-untyped-def]
        [float(part.sum()) for parts in tensors.values() for part in parts]
        return merge(self, tensors, *arguments, **options)

    monkeypatch.setattr(MergeModulelist, "convert", needs_values)
    assert not any(
        t.is_meta for t in open_language_model(folder, load_model_config(folder), "auto").module.parameters()
    )
    same_as_loaded(folder)


def test_one_layer_at_a_time(tmp_path: Path) -> None:
    """What has been read and sent is not kept."""
    folder = experts(tmp_path / "experts")
    weights = open_language_model(folder, load_model_config(folder), "auto")
    for _name, _tensor in weights.tensors():
        kept = {
            name.split(".")[2] for name, t in weights.module.named_parameters() if "layers" in name and not t.is_meta
        }
        assert not kept


def test_files_that_break_while_they_are_read(tmp_path: Path) -> None:
    folder = experts(tmp_path / "experts")
    weights = open_language_model(folder, load_model_config(folder), "auto")
    weights.layers["model.layers.1."]["model.layers.1.mlp.experts.0.up_proj.weight"] = torch.zeros(3, 3)
    with raises_with(ModelError, "model.layers.1.mlp.experts"):
        list(weights.tensors())
    weights.layers["model.norm.weight"]["model.norm.weight"] = torch.zeros(3)
    with raises_with(ModelError, "model.norm.weight"):
        list(weights.read_layer("model.norm.weight"))


def test_value_head(tmp_path: Path, tied: Path) -> None:
    """A new head is zero, and a saved one is read."""
    config = load_model_config(tied)
    new = dict(open_value_model(tied, config, "auto").tensors())
    assert not new["score.weight"].any() and not new["score.bias"].any()
    new["score.weight"] = torch.arange(16.0)[None]
    new["score.bias"] = torch.tensor([7.0])
    (tmp_path / "value").mkdir()
    save_value_model({name: t for name, t in new.items() if "inv_freq" not in name}, config, tmp_path / "value")
    again = open_value_model(tmp_path / "value", load_model_config(tmp_path / "value"), "auto")
    assert isinstance(again.module, ValueModel)
    found = dict(again.tensors())
    assert found.keys() == new.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in new.items())
