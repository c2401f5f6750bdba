"""In which order engines take the training ranks."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from raising import raises_with

from hybridrl.config import load_config
from hybridrl.layouts.topology import ShardedLayout
from hybridrl.rollout import RolloutError, start_replicas


def test_a_model_that_the_driver_cannot_build_is_placed_rank_after_rank(
    tmp_path: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}})
    )
    (tmp_path / "configuration_mine.py").write_text(
        "from transformers import PreTrainedConfig\nclass MineConfig(PreTrainedConfig):\n    model_type = 'mine'\n"
    )
    monkeypatch.setattr(start_replicas, "_nodes_of", lambda slots: ["node", "node"])  # Ray's table
    policy: Any = SimpleNamespace(training_layout=lambda: [ShardedLayout(2)])
    pool: Any = SimpleNamespace(slots=lambda: [])
    for path, known in ((tiny_model, True), (tmp_path, False)):
        config = load_config(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={path}",
                "actor_rollout_ref.model.trust_remote_code=true",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            ],
        ).actor_rollout_ref
        assert (start_replicas.replica_order(config, policy, pool) is not None) == known
        assert ("rank after rank" not in capfd.readouterr().err) == known


@pytest.mark.parametrize("name", ["vllm", "sglang", "hf"])
def test_changes_alone_are_refused_where_there_is_no_network_to_save(name: str) -> None:
    words = [f"actor_rollout_ref.rollout.name={name}", "actor_rollout_ref.rollout.checkpoint_engine.delta=true"]
    words += ["actor_rollout_ref.model.path=m", "data.train_files=x", "data.val_files=x"]
    config = load_config("ppo_trainer", words).actor_rollout_ref
    policy: Any = SimpleNamespace(resource_pool=None)
    for group in (policy, None):
        with raises_with(RolloutError, "checkpoint_engine.delta=True", "own_pool", "delta=false"):
            start_replicas.start_rollout(config, group)
