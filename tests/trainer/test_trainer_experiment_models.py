"""A run is not continued with other weights, wherever its models lie, and is with the same ones."""

from __future__ import annotations

import copy
import functools
import shutil
from pathlib import Path

import pytest
import torch
from raising import raises_with
from safetensors.torch import save_file

from hybridrl.config import PPOTrainerConfig, load_config
from hybridrl.errors import CheckpointError
from hybridrl.trainer.experiment import Definition, changed_keys, complete_models, definition_of
from hybridrl.trainer.own_folder import settle_folder
from hybridrl.trainer.run import TrainingRun
from hybridrl.utils import content_digest

MODEL = "actor_rollout_ref.model.path"


def make_model(folder: str, value: float = 1.0) -> Path:
    """A folder that looks like a model, with 40,000 bytes of weights."""
    path = Path(folder)
    path.mkdir(parents=True)
    weights = {"a": torch.zeros(5000), "b": torch.zeros(4999)}
    weights["b"][2500] = value
    save_file(weights, path / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / name).write_text('{"size": 1}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "README.md").write_text("A model.")
    return path


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_model("models/a")
    return tmp_path


@functools.cache
def settings() -> PPOTrainerConfig:
    return load_config(
        "ppo_trainer",
        [
            f"{MODEL}=models/a",
            "algorithm.adv_estimator=grpo",
            "trainer.default_local_dir=run",
            "trainer.logger=[]",
            "trainer.report=False",
        ],
    )


def definition(*more: str) -> Definition:
    return definition_of(load_config("ppo_trainer", [f"{MODEL}=models/base", *more]))


def train(model: str = "models/a", steps: int = 2) -> int:
    """Do the steps of a run that computes nothing; the step that it began after."""
    config = copy.deepcopy(settings())
    config.actor_rollout_ref.model.path = model
    settle_folder(config)
    with TrainingRun(config, config.trainer, steps, identity={"model": "x"}) as run:
        run.restore(lambda folder, state: None)
        before = run.step
        while not run.is_last:
            with run.measured_step():
                run.report({"train/loss": 1.0})
            run.save(lambda folder: {})
    return before


def write_weights() -> None:
    shutil.rmtree("models/a")
    make_model("models/a", 2.0)


def write(file: str, text: str = '{"size": 2}') -> None:
    Path("models/a", file).write_text(text)


@pytest.mark.parametrize("whole", [True, False], ids=["read whole", "sampled"])
def test_other_contents_at_the_same_path_are_another_experiment(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not whole:
        monkeypatch.setattr(content_digest, "READ_WHOLE", 1000)
        monkeypatch.setattr(content_digest, "_BLOCKS", 1)  # none of which has the value that differs
    assert train() == 0 and train() == 2
    write("README.md", "Another text.")
    write("optimizer.pt", "left by a trainer")
    assert train() == 2
    write_weights()
    with pytest.raises(CheckpointError, match=rf"content of {MODEL} was '\w+', now '\w+'"):
        train(steps=4)
    shutil.rmtree("models/a")
    make_model("models/a")
    assert train() == 2
    for file in ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja", "modeling_own.py"):
        before = Path("models/a", file).read_text() if Path("models/a", file).exists() else None
        write(file)
        with raises_with(CheckpointError, MODEL):
            train(steps=4)
        Path("models/a", file).unlink()
        if before is not None:
            write(file, before)
    assert train() == 2


def test_a_moved_model_is_told_and_the_run_goes_on(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    train()
    shutil.move("models/a", "elsewhere")
    capsys.readouterr()
    assert train("elsewhere", steps=3) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{MODEL} was '{place}/models/a', now '{place}/elsewhere'" in said
    assert train("elsewhere", steps=4) == 3
    make_model("models/a", 3.0)
    with raises_with(CheckpointError, MODEL, "elsewhere", "now", "models/a"):
        train("models/a", steps=5)


READ = {
    "tokenizer": (f"{MODEL.removesuffix('path')}tokenizer_path", ()),
    "configuration": (f"{MODEL.removesuffix('path')}hf_config_path", ()),
    "adapter": (f"{MODEL.removesuffix('path')}lora_adapter_path", ()),
    "critic": ("critic.model.path", ("algorithm.adv_estimator=gae",)),
    "reward model": ("reward.reward_model.model.path", ("reward.reward_model.enable=True",)),
    "teacher": ("+distillation.teacher_models.big.model_path", ("distillation.enabled=True",)),
    "teacher's tokenizer": ("critic.model.tokenizer_path", ("algorithm.adv_estimator=gae",)),
    "model of a role": ("roles.prime.model.path", ("algorithm.adv_estimator=prime", "roles.prime.ref_path=b")),
    "copy of a role": ("roles.prime.ref_path", ("algorithm.adv_estimator=prime", "roles.prime.model.path=b")),
    "draft model": ("+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.model", ()),
    "model of a reward": ("+reward.custom_reward_function.reward_kwargs.model", ()),
    "megatron's weights": ("actor_rollout_ref.actor.megatron.dist_checkpointing_path", ()),
}


@pytest.mark.parametrize("name", READ)
def test_every_model_that_is_read_counts(name: str) -> None:
    key, more = READ[name]
    words = ["algorithm.adv_estimator=grpo", *more, f"{key}=models/a"]
    first = definition(*words)
    assert changed_keys(first, definition(*words)) == []
    write_weights()
    changed = changed_keys(first, definition(*words))
    assert len(changed) == 1 and key.lstrip("+").startswith(changed[0]), changed


def test_a_model_that_no_part_reads_does_not_count() -> None:
    words = ["algorithm.adv_estimator=grpo", "critic.model.path=models/a", "reward.reward_model.model.path=models/a"]
    first = definition(*words)
    write_weights()
    assert changed_keys(first, definition(*words)) == []


def download(commit: str, value: float = 1.0, weights: bool = True) -> Path:
    """What the hub's client leaves in its cache, in which `main` is this commit then."""
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE) / "models--org--tiny"
    snapshot = cached / "snapshots" / commit
    shutil.rmtree(snapshot, ignore_errors=True)
    make_model(str(snapshot), value)
    if not weights:
        (snapshot / "model.safetensors").unlink()
    (cached / "refs").mkdir(exist_ok=True)
    (cached / "refs/main").write_text(commit)
    return snapshot


def test_models_of_the_hub_are_compared_by_commit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place / "cache"))
    config = copy.deepcopy(settings())
    config.actor_rollout_ref.model.path = "org/tiny"
    unknown = definition_of(config)
    assert unknown["models"] == {}
    snapshot = download("c0ffee", weights=False)
    first = definition_of(config)
    assert changed_keys(first, definition_of(config)) == changed_keys(unknown, first) == []
    shutil.copytree(download("c0ffee"), "copied")
    complete = complete_models(first, config)
    config.actor_rollout_ref.model.path = "copied"
    assert changed_keys(complete, definition_of(config)) == [], "a local copy is the same model"
    config.actor_rollout_ref.model.path = "org/tiny"
    download("c0ffee2", 2.0)
    assert changed_keys(first, definition_of(config)) == [MODEL]
    (snapshot.parent.parent / "refs/main").write_text("c0ffee")
    assert changed_keys(first, definition_of(config)) == []
