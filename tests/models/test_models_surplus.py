"""Weight files with more than the model that their config.json describes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from raising import raises_with
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.config import load_config
from hybridrl.config.schema.model import ModelConfig
from hybridrl.errors import ModelError
from hybridrl.models.info import check_files
from hybridrl.models.kinds import KINDS
from hybridrl.models.model_config import load_model_config
from hybridrl.trainer.ppo.prepare_ppo import check_engines

KINDS_TRIED = ("language_model", "value_model", "reward_model")


def changed(model: Path, target: Path, more: dict[str, torch.Tensor] | None = None, **config: object) -> Path:
    shutil.copytree(model, target)
    tensors = load_file(target / "model.safetensors") | (more or {})
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | config), encoding="utf-8")
    return target


@pytest.mark.parametrize("way", ["load", "open"])
@pytest.mark.parametrize("kind", KINDS_TRIED)
def test_more_layers_than_the_configuration(
    kind: str, way: str, micro_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = AutoConfig.from_pretrained(micro_model).num_hidden_layers
    assert layers > 1
    folder = changed(micro_model, tmp_path / "m", num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(ModelError, match=rf"has {layers} layers|files have {layers} layers.*num_hidden_layers=1"):
        getattr(KINDS[kind], way)(folder, load_model_config(folder), torch.float32, False)
    # What the user's settings take away is left out, and told.
    own = changed(micro_model, tmp_path / "own")
    config = load_model_config(own, override={"num_hidden_layers": 1})
    getattr(KINDS[kind], way)(own, config, torch.float32, False)
    assert "sets num_hidden_layers=1, so" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", KINDS_TRIED)
@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.gate.weight", "model.norm_2.weight", "model.layers.0.mlp.experts.0.up_proj.weight"],
)
def test_a_tensor_without_a_place_is_named(kind: str, name: str, micro_model: Path, tmp_path: Path) -> None:
    folder = changed(micro_model, tmp_path / "m", {name: torch.ones(3)})
    with raises_with(ModelError, "1 tensors", name.removeprefix("model.")):
        KINDS[kind].load(folder, load_model_config(folder), torch.float32, False)


@pytest.mark.parametrize("kind", KINDS_TRIED)
@pytest.mark.parametrize("prefix", ["model.visual.blocks.", "vision_tower.encoder.", "model.audio_tower."])
def test_a_tower_is_not_dropped(kind: str, prefix: str, micro_model: Path, tmp_path: Path) -> None:
    more = {f"{prefix}{number}.weight": torch.ones(3) for number in range(21)}
    folder = changed(micro_model, tmp_path / "m", more)
    with pytest.raises(ModelError, match="21 tensors of parts that read images or sound"):
        KINDS[kind].load(folder, load_model_config(folder), torch.float32, False)


@pytest.mark.parametrize("kind", KINDS_TRIED)
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.position_ids",
        "v_head.summary.weight",
        "mtp.layers.0.input_layernorm.weight",
    ],
)
def test_what_a_model_can_do_without(kind: str, name: str, micro_model: Path, tmp_path: Path) -> None:
    folder = changed(micro_model, tmp_path / "m", {name: torch.ones(3)})
    for way in ("load", "open"):
        getattr(KINDS[kind], way)(folder, load_model_config(folder), torch.float32, False)


def test_a_tied_output_layer_that_is_stored(micro_model: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(micro_model)
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    tensors = load_file(tmp_path / "tied" / "model.safetensors")
    folder = changed(
        tmp_path / "tied", tmp_path / "m", {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    )
    for kind in KINDS_TRIED:
        KINDS[kind].load(folder, load_model_config(folder), torch.float32, False)


@pytest.mark.parametrize("key", ["actor_rollout_ref.model.path", "critic.model.path"])
@pytest.mark.parametrize(
    ("more", "config", "said"),
    [
        ({"model.layers.0.self_attn.gate.weight": torch.ones(3)}, {}, "1 tensors that .* has no place for"),
        ({}, {"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "files have . layers"),
        ({}, {"num_hidden_layers": 9, "layer_types": ["full_attention"] * 9}, "do not fill the model .* missing"),
        ({}, {"intermediate_size": 7}, "do not fit its config.json"),
    ],
)
def test_files_of_another_model_are_refused_before_anything_starts(
    key: str,
    more: dict[str, torch.Tensor],
    config: dict[str, object],
    said: str,
    micro_model: Path,
    sort_data: Path,
    tmp_path: Path,
) -> None:
    wrong = changed(micro_model, tmp_path / "m", more, **config)
    files = sorted(sort_data.glob("*.parquet"))
    paths = {"actor_rollout_ref.model.path": micro_model, "critic.model.path": micro_model, key: wrong}
    words = [f"{name}={path}" for name, path in paths.items()] + [f"data.train_files={files[0]}", "data.val_files=null"]
    settings = load_config("ppo_trainer", [*words, "algorithm.adv_estimator=gae", "trainer.device=cpu"])
    with pytest.raises(ModelError, match=said):
        check_engines(settings)


@pytest.mark.parametrize("kind", KINDS_TRIED)
def test_files_of_every_kind_of_model_pass(kind: str, micro_model: Path, micro_reward_model: Path) -> None:
    for folder in (micro_model, micro_reward_model):
        check_files(ModelConfig(path=str(folder)))
