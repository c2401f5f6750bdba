"""Reading configurations and weights, and refusing directories that cannot work."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from raising import raises_with
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification

from hybridrl.errors import ModelError
from hybridrl.models.loading import (
    build_language_model,
    check_weights,
    load_language_model,
    resolve_dtype,
    save_language_model,
)
from hybridrl.models.model_config import load_model_config
from hybridrl.models.tiny import build_tiny_model
from hybridrl.models.value import build_value_model, load_value_model, save_value_model
from hybridrl.registry import import_external_lib


def copy_of(model: Path, target: Path) -> Path:
    shutil.copytree(model, target)
    return target


def test_override_and_dropout(micro_model: Path) -> None:
    config = load_model_config(
        micro_model,
        override={
            "max_position_embeddings": 77,
            "rope_parameters": {"rope_theta": 5.0},
            "attn_implementation": "eager",
        },
    )
    assert config.max_position_embeddings == 77 and config._attn_implementation == "eager"
    assert config.rope_parameters["rope_theta"] == 5.0 and config.rope_parameters["rope_type"] == "default"
    with raises_with(ModelError, "model.override_config.hiden_size=", "Qwen2Config"):
        load_model_config(micro_model, override={"hiden_size": 3})
    assert load_model_config(micro_model, override={"attention_dropout": 0.4}).attention_dropout == 0.0


def test_weights_come_in_the_dtype_asked_for(micro_model: Path, tmp_path: Path) -> None:
    folder = copy_of(micro_model, tmp_path / "half")
    half = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}), encoding="utf-8")
    model = load_language_model(folder, load_model_config(folder), torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.lm_head.weight, half["lm_head.weight"].float())
    for build in (build_language_model, build_value_model):
        read = load_model_config(folder)
        built = build(read, torch.float32)
        assert all(p.is_meta and p.dtype == torch.float32 for p in built.parameters())
        assert read.dtype == torch.bfloat16  # in which the weights are read, and written again


def test_directories_that_cannot_work(micro_model: Path, tmp_path: Path) -> None:
    config = load_model_config(micro_model)
    with raises_with(ModelError, "actor_rollout_ref.model.path"):
        load_model_config(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with raises_with(ModelError, "config.json"):
        load_model_config(str(tmp_path / "empty"))
    bare = copy_of(micro_model, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"bare holds no weights \(no \*.safetensors"):
        load_language_model(bare, config, torch.float32)
    (bare / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be read"):
        load_model_config(bare)
    torn = copy_of(micro_model, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:200])
    with raises_with(ModelError, "torn", "model.safetensors"):
        load_language_model(torn, config, torch.float32)


def test_weights_of_another_model(micro_model: Path, tiny_model: Path, tmp_path: Path) -> None:
    mixed = copy_of(micro_model, tmp_path / "mixed")
    shutil.copy(tiny_model / "model.safetensors", mixed / "model.safetensors")
    with pytest.raises(ModelError, match="mixed"):
        load_language_model(mixed, load_model_config(mixed), torch.float32)
    partial = copy_of(micro_model, tmp_path / "partial")
    tensors = load_file(partial / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    with raises_with(ModelError, "1 missing", "model.norm.weight"):
        load_language_model(partial, load_model_config(partial), torch.float32)


def test_value_model_round_trip(micro_model: Path, tmp_path: Path) -> None:
    config = load_model_config(micro_model)
    model = load_value_model(micro_model, config, torch.float32)
    ids = torch.arange(20)[None]
    assert not model(input_ids=ids).logits.any()
    torch.nn.init.normal_(model.score.weight)
    torch.nn.init.normal_(model.score.bias)
    save_value_model(dict(model.named_parameters()), config, tmp_path)
    again = load_value_model(tmp_path, load_model_config(tmp_path), torch.float32)
    opened = AutoModelForTokenClassification.from_pretrained(tmp_path)
    expected = model(input_ids=ids).logits
    for other in (again, opened.eval()):
        torch.testing.assert_close(other(input_ids=ids).logits, expected)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_saved_weights_have_the_mode_that_the_umask_gives(
    micro_model: Path, tmp_path: Path, umask: int, mode: int
) -> None:
    """safetensors makes its files readable by their owner alone, and a server of another user could not load them."""
    config = load_model_config(micro_model)
    policy, critic = (load(micro_model, config, torch.float32) for load in (load_language_model, load_value_model))
    before = os.umask(umask)
    try:
        save_language_model(dict(policy.named_parameters()), config, tmp_path / "policy")
        (tmp_path / "critic").mkdir()
        save_value_model(dict(critic.named_parameters()), config, tmp_path / "critic")
        build_tiny_model(tmp_path / "tiny", hidden=16, layers=1, heads=2, kv_heads=1)
    finally:
        os.umask(before)
    files = [file for name in ("policy", "critic", "tiny") for file in (tmp_path / name).iterdir()]
    assert {file.suffix for file in files} >= {".json", ".safetensors"}
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {oct(mode)}


def test_value_of_a_bfloat16_backbone_is_float32(micro_model: Path) -> None:
    model = load_value_model(micro_model, load_model_config(micro_model), torch.bfloat16)
    assert model.score.weight.dtype == torch.float32
    assert model(input_ids=torch.arange(5)[None]).logits.dtype == torch.float32


def test_names() -> None:
    assert resolve_dtype("auto", "key") == torch.float32
    with raises_with(ModelError, "fsdp_config.dtype='int3'", "dtype"):
        resolve_dtype("int3", "fsdp_config.dtype")
    import_external_lib("json, pathlib")
    import_external_lib(None)
    with raises_with(ModelError, "model.external_lib=no_such_module_here"):
        import_external_lib("json,no_such_module_here")


def _shortened(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 5)


def _pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def _headless(file: Path) -> None:
    file.write_bytes(b"\x10\0\0\0\0\0\0\0" + b"no json at all!!")


def _almost_nothing(file: Path) -> None:
    file.write_bytes(b"\x10\0")


@pytest.mark.parametrize(
    ("damage", "said"),
    [(_shortened, "header describes"), (_pointer, "Git LFS"), (_headless, "header"), (_almost_nothing, "2 bytes")],
)
def test_incomplete_weights_are_named_before_they_are_loaded(micro_model, tmp_path, damage, said):
    model = tmp_path / "model"
    shutil.copytree(micro_model, model)
    (file,) = model.glob("*.safetensors")
    check_weights(model)
    damage(file)
    with raises_with(ModelError, file.name, said):
        check_weights(model)


def test_a_weight_file_that_the_index_names_is_missed(micro_model, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(micro_model, model)
    (file,) = model.glob("*.safetensors")
    index = {"weight_map": {"a": file.name, "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with raises_with(ModelError, "model-00002-of-00002.safetensors"):
        check_weights(model)
