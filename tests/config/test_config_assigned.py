"""Settings that a program assigns after composition are checked like those of the command line."""

from pathlib import Path

import pytest
from raising import raises_with

from hybridrl.config import ConfigError, load_config, validate
from hybridrl.config.compose import compose_config

GRPO = [
    "actor_rollout_ref.model.path=model",
    "data.train_files=train.parquet",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=8",
]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "train.parquet").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_misspelt_setting_is_refused_where_it_is_assigned(here):
    config = load_config("ppo_trainer", GRPO)
    with raises_with(ConfigError, "totl_epochs", "total_epochs"):
        config.trainer.totl_epochs = 3
    config.trainer.total_epochs = 3
    validate(config)


@pytest.mark.parametrize(
    ("group", "name", "value", "said"),
    [
        ("trainer", "total_epochs", "three", r"trainer.total_epochs='three'.*whole number"),
        ("trainer", "total_epochs", "3", r"trainer.total_epochs='3': must be 3"),
        ("trainer", "total_epochs", 0, r"trainer.total_epochs=0: must be greater than 0"),
        ("data", "train_files", "train.parquet", r"data.train_files='train.parquet': must be \['train.parquet'\]"),
        ("trainer", "logger", ["consol"], r"trainer.logger=\['consol'\].*console"),
    ],
)
def test_an_assigned_value_has_type_and_limits(here, group, name, value, said):
    config = load_config("ppo_trainer", GRPO)
    setattr(config[group], name, value)
    with pytest.raises(ConfigError, match=said):
        validate(config)


def test_settings_from_a_program_count_as_words(here):
    settings = {"trainer.total_epochs": 3, "actor_rollout_ref": {"actor": {"optim": {"lr": 0.5}}}}
    config = compose_config("ppo_trainer", GRPO, settings=settings).config
    assert (config.trainer.total_epochs, config.actor_rollout_ref.actor.optim.lr) == (3, 0.5)
    with raises_with(ConfigError, "trainer.totl_epochs", "trainer.total_epochs"):
        compose_config("ppo_trainer", GRPO, settings={"trainer": {"totl_epochs": 3}})
    with raises_with(ConfigError, "data.train_batch_size='a, b'", "whole number"):
        compose_config("ppo_trainer", GRPO, settings={"data.train_batch_size": "a, b"})


@pytest.mark.parametrize(
    ("program", "root", "words"),
    [
        ("hybridrl.trainer.ppo.run_ppo:run_ppo", "ppo_trainer", [*GRPO, "actor_rollout_ref.rollout.temperature=0"]),
        (
            "hybridrl.trainer.supervised.run_supervised:run_supervised",
            "sft_trainer",
            ["data.train_files=train.parquet"],
        ),
        ("hybridrl.trainer.generation.run_generation:run_generation", "generation", ["data.path=train.parquet"]),
        ("hybridrl.trainer.evaluation:run_evaluation", "evaluation", ["data.path=nowhere.parquet"]),
    ],
)
def test_every_program_validates_before_it_runs(here, program, root, words):
    import importlib

    module, _, name = program.partition(":")
    with pytest.raises(ConfigError, match=r"temperature=0|model.path is not set|nowhere.parquet|output_path"):
        getattr(importlib.import_module(module), name)(load_config(root, words))
    assert sorted(path.name for path in here.iterdir()) == ["model", "train.parquet"]
