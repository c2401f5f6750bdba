"""What a training engine refuses before any process has loaded a model. No process is started here."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from raising import raises_with
from test_trainer_sft import configured, conversations  # noqa: F401 (a fixture)

from hybridrl.config import ModelConfig, OptimConfig, load_config
from hybridrl.errors import ModelError
from hybridrl.models.model_config import config_of
from hybridrl.models.tiny import build_tiny_model
from hybridrl.rollout.select import resolve_rollout
from hybridrl.trainer.ppo.prepare_ppo import check_engines
from hybridrl.trainer.startup import check_engine
from hybridrl.trainer.supervised.prepare_supervised import prepare


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, heads=2, kv_heads=2)


@pytest.fixture(scope="module")
def sft(model: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: F811
    """Return a function that prepares fine-tuning with further words."""

    def prepared(*words: str, path: Path = model) -> Any:
        return prepare(configured(path, conversations, tmp_path_factory.mktemp("run"), 2, *words))

    return prepared


def actor(strategy: str, model: Path) -> Any:
    return load_config("ppo_trainer", [f"actor_rollout_ref.actor.strategy={strategy}"]).actor_rollout_ref.actor


OVERRIDES = "optim.override_optimizer_config"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["optim.optimizer=Muon"], r"engine: optim\.optimizer=Muon.*AdamW"),
        (["optim.optimizer_impl=torchao.optim", "optim.optimizer=AdamW8bit"], r"optim\.optimizer=AdamW8bit.*AdamW"),
        ([f"{OVERRIDES}.no_such_argument=1"], r"AdamW does not accept no_such_argument"),
        ([f"{OVERRIDES}.eps=-1.0"], r"AdamW refuses its settings.*epsilon.*-1"),
        ([f"{OVERRIDES}.optimizer_cpu_offload=True"], r"optimizer_cpu_offload=True.*megatron\.optimizer_offload=True"),
        ([f"{OVERRIDES}.optimizer_offload_fraction=0.5"], r"offload_fraction=0\.5.*megatron\.optimizer_offload=True"),
        ([f"{OVERRIDES}.overlap_cpu_optimizer_d2h_h2d=True"], r"d2h_h2d=True.*megatron\.optimizer_offload=True"),
        ([f"{OVERRIDES}.use_precision_aware_optimizer=True"], r"use_precision_aware_optimizer=True.*float32"),
    ],
)
def test_megatron_refuses_optimizers_before_a_model_is_loaded(sft, words, match) -> None:
    with pytest.raises(ModelError, match=match):
        sft("engine=megatron", *words)


def test_megatrons_own_optimizer_settings_pass_while_they_are_off(sft) -> None:
    off = (
        "{optimizer_cpu_offload: false, optimizer_offload_fraction: 0, use_precision_aware_optimizer: false, eps: 1e-5}"
    )
    sft("engine=megatron", f"{OVERRIDES}={off}")


def test_fsdp_refuses_arguments_that_its_optimizer_does_not_take(sft, model) -> None:
    with raises_with(ModelError, "AdamW", "no_such_argument"):
        sft(f"{OVERRIDES}.no_such_argument=1")
    settings, path = actor("fsdp2", model), ModelConfig(path=str(model))
    for optim in (OptimConfig(), OptimConfig(optimizer="Muon", override_optimizer_config={"adamw_eps": 1e-6})):
        check_engine("actor", settings, path, 2, optim)
    wrong = OptimConfig(optimizer="Muon", override_optimizer_config={"adamw_momentum": 1})
    with pytest.raises(ModelError, match=r"^actor\.fsdp_config: .*AdamW does not accept momentum"):
        check_engine("actor", settings, path, 2, wrong)
    check_engine("actor", settings, path, 2, None)


def test_weights_of_a_checkpoint_of_megatron_are_enough(sft, model, tmp_path) -> None:
    """In `dist_ckpt` of the model's folder, or where `dist_checkpointing_path` says; fsdp2 needs its own."""
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ModelError, match="bare holds no weights"):
        sft("engine=megatron", path=bare)
    written = tmp_path / "written"
    written.mkdir()
    for name in ("metadata.json", "common.pt"):
        (written / name).touch()
    where = "engine.dist_checkpointing_path"
    sft("engine=megatron", "engine.use_dist_checkpointing=True", f"{where}={written}", path=bare)
    for words in ([], [f"{where}={tmp_path}"]):
        with raises_with(ModelError, "megatron.dist_checkpointing_path"):
            sft("engine=megatron", "engine.use_dist_checkpointing=True", *words, path=bare)
    shutil.copytree(written, bare / "dist_ckpt")
    sft("engine=megatron", path=bare)
    with pytest.raises(ModelError, match="bare holds no weights"):
        sft(path=bare)


ROPE = "{rope_type: dynamic, factor: 2.0}"


def test_lengths_beyond_those_of_fixed_rotary_frequencies_are_refused(sft, model: Path) -> None:
    """In fine-tuning, in generation, and for the other models of reinforcement learning."""
    limit = config_of(ModelConfig(path=str(model))).max_position_embeddings
    scaled = f"+model.override_config.rope_parameters={ROPE}"
    sft(scaled, f"data.max_length={limit}")
    with raises_with(ModelError, "data.max_length", f"{limit + 1} tokens", "rope_type=dynamic", limit):
        sft(scaled, f"data.max_length={limit + 1}")

    def policy(response: int, scaled: str) -> Any:
        words = [f"actor_rollout_ref.model.path={model}", f"data.max_response_length={response}"]
        words += ["data.max_prompt_length=10", "actor_rollout_ref.rollout.name=hf", "trainer.n_gpus_per_node=1"]
        words += ["data.train_files=x", "data.val_files=x", f"+{scaled}.model.override_config.rope_parameters={ROPE}"]
        return load_config("ppo_trainer", words)

    assert resolve_rollout(policy(limit - 10, "actor_rollout_ref").actor_rollout_ref, use_gpu=False) == "hf"
    with raises_with(ModelError, f"{limit + 1} tokens", "rope_type=dynamic"):
        resolve_rollout(policy(limit - 9, "actor_rollout_ref").actor_rollout_ref, use_gpu=False)
    check_engines(policy(limit - 10, "critic"))
    with raises_with(ModelError, "critic", f"{limit + 1} tokens", "rope_type=dynamic"):
        check_engines(policy(limit - 9, "critic"))
