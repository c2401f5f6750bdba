"""`placement=auto`: the plan is applied, recorded, and found again; what is not known is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridrl.config import load_config
from hybridrl.config.checks.check_run import validate
from hybridrl.config.compose import with_settings
from hybridrl.config.dotted import get_key
from hybridrl.config.output import as_dict
from hybridrl.errors import ConfigError, ModelError, PlacementError, UserError
from hybridrl.observe.run_folder import write_run_info
from hybridrl.plan.overrides import overrides
from hybridrl.plan.plan_command import read_request
from hybridrl.plan.planned_run import planned
from hybridrl.plan.run_plan import plans

FACTS = json.loads(Path(__file__).with_name("public_models.json").read_text(encoding="utf-8"))


@pytest.fixture
def words(tmp_path: Path, sort_data: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(FACTS["qwen2.5-7b"]), encoding="utf-8")
    settings = ["data.train_batch_size=256", "data.max_response_length=4096", "actor_rollout_ref.rollout.n=8"]
    return [f"data.train_files={sort_data / 'train.parquet'}", f"actor_rollout_ref.model.path={tmp_path / 'model'}",
            *settings, "algorithm.adv_estimator=grpo"]  # fmt: skip


def test_a_run_gets_the_settings_that_the_command_prints(words: list[str]) -> None:
    more = ["devices=16xH100", "response=1000"]
    request = read_request("grpo", [*words, *more])
    expected = overrides(request, plans(request)[0])
    config = planned(load_config("ppo_trainer", [*words, *more, "placement=auto"]))
    validate(config)
    assert set(config.placement.planned) == set(expected)
    for key, value in config.placement.planned.items():
        assert str(value) == expected[key] and get_key(config, key) == value
    assert config.placement.pools == {"global": [8, 8]}, "what follows a planned setting follows it"
    assert planned(config) is config


def test_given_settings_stay(words: list[str]) -> None:
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    config = planned(load_config("ppo_trainer", [*words, "devices=16xH100", "placement=auto", f"{key}=4"]))
    assert get_key(config, key) == 4 and key not in config.placement.planned


def test_a_resumed_run_is_not_planned_again(words: list[str], tmp_path: Path) -> None:
    words = [*words, "devices=16xH100", "placement=auto", f"trainer.default_local_dir={tmp_path / 'run'}"]
    first = planned(load_config("ppo_trainer", words))
    write_run_info(tmp_path / "run", first)
    path = tmp_path / "run" / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    assert tree["placement"]["planned"] == first.placement.planned
    tree["placement"]["planned"]["actor_rollout_ref.rollout.max_num_seqs"] = 123  # as no plan would have it
    path.write_text(yaml.safe_dump(tree))
    again = planned(load_config("ppo_trainer", words))
    assert again.actor_rollout_ref.rollout.max_num_seqs == 123
    others = planned(load_config("ppo_trainer", [*words, "devices=8xH100"]))
    assert others.trainer.nnodes == 1 and others.actor_rollout_ref.rollout.max_num_seqs != 123
    over = planned(load_config("ppo_trainer", [*words, "trainer.resume_mode=disable"]))
    assert over.actor_rollout_ref.rollout.max_num_seqs != 123


def test_on_a_cpu_all_roles_share_the_processes(words: list[str]) -> None:
    more = ["placement=auto", "trainer.n_gpus_per_node=2", "trainer.device=cpu"]
    config = planned(load_config("ppo_trainer", [*words, *more]))
    assert config.placement.pools == {"global": [2]} and config.trainer.nnodes == 1


@pytest.mark.parametrize(
    ("more", "error", "named"),
    [
        (("devices=16xRTX4090",), PlacementError, ("RTX4090", "H100")),
        (("trainer.nnodes=2",), PlacementError, ("trainer.nnodes=2", "placement.devices")),
        (("devices=16xH100", "actor_rollout_ref.model.path=none"), ModelError, ("none", "config.json")),
        (("devices=16xH100", "actor_rollout_ref.rollout.name=hf"), ConfigError, ("rollout.name=hf",)),
        (("devices=1xH100",), PlacementError, ("devices=1xH100",)),
    ],
)
def test_what_the_planner_does_not_know_is_refused(
    words: list[str], more: tuple[str, ...], error: type[UserError], named: tuple[str, ...]
) -> None:
    with pytest.raises(error) as refused:
        planned(load_config("ppo_trainer", [*words, "placement=auto", *more]))
    assert all(name in str(refused.value) for name in named)


def test_settings_that_follow_others_follow_new_values(words: list[str]) -> None:
    config = load_config("ppo_trainer", [*words, "trainer.experiment_name=first"])
    changed: Any = with_settings(config, {"trainer.experiment_name": "second", "data.max_response_length": 100})
    assert changed.trainer.default_local_dir.endswith("second")
    assert changed.actor_rollout_ref.rollout.response_length == 100
    assert config.actor_rollout_ref.rollout.response_length == 4096
    assert as_dict(with_settings(config, {})) == as_dict(config)
    with pytest.raises(ConfigError) as refused:
        with_settings(config, {"trainer.nnodes": "many"})
    assert "trainer.nnodes" in str(refused.value)


@pytest.mark.slow(40)
def test_a_run_on_a_cpu(
    tmp_path: Path, finish: Callable[..., Any], joined: str, micro_model: Path, sort_data: Path
) -> None:
    command = [joined, "-m", "hybridrl", "grpo", "placement=auto", f"model={micro_model}", "trainer.device=cpu",
               f"data.train_files={sort_data / 'train.parquet'}", "data.train_batch_size=8", "ppo_mini_batch_size=8",
               "data.max_prompt_length=32", "data.max_response_length=4", "actor_rollout_ref.rollout.n=2",
               "trainer.save_freq=1", f"trainer.default_local_dir={tmp_path / 'run'}"]  # fmt: skip
    ended = finish([*command, "trainer.total_training_steps=1"], cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr.count("placement=auto: no GPU") == 1
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["placement"]["planned"]["trainer.nnodes"] == 1
    ended = finish([*command, "trainer.total_training_steps=2"], cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "as planned when the run began" in ended.stderr and "placement=auto: no GPU" not in ended.stderr
    assert (
        not (tmp_path / "run" / "config_changes.yaml").exists()
        or "placement" not in (tmp_path / "run" / "config_changes.yaml").read_text()
    )
