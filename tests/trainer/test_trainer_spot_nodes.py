"""Replicas that leave a running asynchronous run with their nodes, and others that join it."""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.trainer.ppo.ledger import GroupState
from hybridrl.trainer.ppo.ledger_journal import read_journal

ADDED, LOST_AGAIN = 3, 5  # see spot_nodes.py
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(char < "m" for char in solution_str) / max(len(solution_str), 1)
"""


@pytest.mark.slow(30)
def test_a_run_outlives_a_lost_node_and_uses_one_that_joins(
    micro_model: Path, sort_data: Path, tmp_path: Path, finish: Callable[..., Any], forked: str
) -> None:
    (tmp_path / "letters.py").write_text(REWARD)
    rollout = "actor_rollout_ref.rollout"
    words = [
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        f"reward.custom_reward_function.path={tmp_path / 'letters.py'}",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=4",
        "data.gen_batch_size=1",
        "data.max_prompt_length=24",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.v1.trainer_mode=separate_async",
        f"{rollout}.name=plain_engine:PlainEngine",
        f"{rollout}.n=3",
        f"{rollout}.nnodes=2",
        f"{rollout}.n_gpus_per_node=1",
        f"{rollout}.replicas.min=2",
        f"{rollout}.replicas.max=2",
        f"{rollout}.replicas.wait_s=30",
        "trainer.device=cpu",
        "trainer.total_training_steps=20",
        "trainer.threads_per_worker=1",
        "trainer.journal=True",
        "trainer.report=False",
        "trainer.logger=[file]",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = finish([forked, Path(__file__).with_name("spot_nodes.py"), *words], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for name, version in (("joined", 3), ("later", 4)):
        one, other = found[name]
        assert one[0] == other[0] and one[2] == other[2] == [[version, 8]], (
            "the one that stayed, and the one that joined"
        )
        assert one[1] == pytest.approx(other[1], abs=1e-6)
    assert found["joined"][0][1] != pytest.approx(found["later"][0][1], abs=1e-3), "the weights had changed"

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = {line["training/global_step"]: line for line in lines if "timing_s/step" in line}
    assert max(steps) in (5, 6, 7), "after the second loss, what was answered ahead was trained on"
    assert sum(step["rollout/requests_rerun"] for step in steps.values()) > 0
    before = [step for number, step in steps.items() if number <= LOST_AGAIN]
    assert sum(step["rollout/replicas_left"] for step in before) == 1
    assert sum(step["rollout/replicas_joined"] for step in before) == 1
    assert steps[ADDED + 1]["rollout/replicas"] == 2

    assert "replicas.min=2" in found["error"] and "replicas.wait_s" in found["error"]
    assert f"step {max(steps)}, the last complete one" in found["notes"][0]
    assert (tmp_path / "run" / f"global_step_{max(steps)}" / "trainer.json").is_file()
    states = Counter(read_journal(tmp_path / "run" / "ledger.jsonl").states.values())
    assert states[GroupState.RELEASED] == 4 * max(steps) and not states[GroupState.VOID]
