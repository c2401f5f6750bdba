"""Colocated, split and standalone placements on two nodes: which process runs where."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_placements_on_two_nodes(
    micro_model: Path, sort_data: Path, tmp_path: Path, finish: Callable[..., Any], forked: str
) -> None:
    words = [
        f"actor_rollout_ref.model.path={micro_model}",
        f"critic.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "data.train_batch_size=8",
        "data.max_prompt_length=24",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=1",
        "trainer.threads_per_worker=1",
        "trainer.save_last=False",
        "trainer.save_freq=-1",
        "trainer.report=False",
        "trainer.logger=[]",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = finish([forked, Path(__file__).with_name("two_nodes.py"), *words], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [found[name]["step"] for name in ("colocated", "split", "standalone")] == [1, 1, 1]

    # trainer.nnodes=2: every model on both nodes, and a replica of two devices next to the ranks of its weights
    colocated = found["colocated"]
    first, second = (colocated["critic"][rank][0] for rank in (0, 2))
    assert first != second
    every = [[first, ["0", "4", "0", "2"]], [first, ["1", "4", "1", "2"]]]
    every += [[second, ["2", "4", "0", "2"]], [second, ["3", "4", "1", "2"]]]
    assert colocated["actor_rollout"] == colocated["critic"] == colocated["ref"] == every
    assert colocated["replicas"] == [[first, [0, 1]], [second, [2, 3]]]

    def pair(node: str) -> list[Any]:
        return [[node, ["0", "2", "0", "2"]], [node, ["1", "2", "1", "2"]]]

    split = found["split"]
    policy, value = split["actor_rollout"][0][0], split["critic"][0][0]
    assert {policy, value} == {first, second}
    assert split["actor_rollout"] == pair(policy) and split["critic"] == split["ref"] == pair(value)
    assert split["replicas"] == [[policy, [0]], [policy, [1]]], "replicas take turns with the policy alone"

    standalone = found["standalone"]
    training, generating = standalone["actor_rollout"][0][0], standalone["replicas"][0][0]
    assert {training, generating} == {first, second}
    assert standalone["actor_rollout"] == standalone["critic"] == standalone["ref"] == pair(training)
    assert standalone["replicas"] == [[generating, []]] * 2, "replicas share no device with a training rank"

    # The driver's node has no GPU and the cluster has one, so `auto` is an engine.
    assert "rollout.name=auto: generating with first_on_gpu" in done.stderr and "generating with hf" not in done.stderr
    assert "GPU" in found["auto"]
