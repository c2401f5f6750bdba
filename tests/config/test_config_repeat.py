"""A run's `config.yaml` has every setting, mostly at the default: it composes to the same, without a notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hybridrl.config.checks.idle import check_idle
from hybridrl.config.compose import compose_config
from hybridrl.observe.run_folder import as_dict

_MODEL = "actor_rollout_ref.model.path=org/m"
RUNS = {
    "grpo": ("ppo_trainer", [_MODEL, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]),
    "ppo": ("ppo_trainer", [_MODEL, "critic.optim.lr=1e-5", "algorithm.use_kl_in_reward=True"]),
    "megatron": ("ppo_trainer", [_MODEL, "actor_rollout_ref.actor.strategy=megatron"]),
    "sft": ("sft_trainer", ["model.path=org/m", "optim.lr=1e-5"]),
    "dpo": ("dpo_trainer", ["model.path=org/m", "dpo.beta=0.2"]),
    "kto": ("kto_trainer", ["model.path=org/m", "kto.beta=0.2"]),
    "rm": ("rm_trainer", ["model.path=org/m"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_settings_of_a_run_compose_to_the_same_without_a_notice(name: str, tmp_path: Path) -> None:
    root, words = RUNS[name]
    first = compose_config(root, [*words, "data.train_files=[a.parquet]"])
    written = yaml.safe_dump(as_dict(first.config), sort_keys=False)
    (tmp_path / "config.yaml").write_text(written, encoding="utf-8")
    again = compose_config(root, [], str(tmp_path), "config")
    assert again.notices == []
    assert check_idle(again.config) == check_idle(first.config)
    assert yaml.safe_dump(as_dict(again.config), sort_keys=False) == written


def test_what_differs_from_the_default_is_still_told(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("actor_rollout_ref: {actor: {megatron: {param_offload: true}}}\n")
    (notice,) = compose_config("ppo_trainer", [_MODEL], str(tmp_path), "config").notices
    assert "strategy=fsdp2 does not read: actor_rollout_ref.actor.megatron.param_offload" in notice
