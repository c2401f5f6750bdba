"""vLLM's processes killed inside every call of a replica: each call fails at once, and the replica's process ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from replica_calls import LIMIT_S, all_fail

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.rollout.inference_engine import EngineSpec
from hybridrl.rollout.replicas.replica_actor import Replica


@contextlib.contextmanager
def replica_of(model: Path, processes: int) -> Iterator[tuple[ray.actor.ActorHandle, list[psutil.Process]]]:
    """A replica, and its engine's processes that compute: the core, or the workers of a core."""
    config = RolloutConfig(prompt_length=16, response_length=16, max_num_seqs=8, tensor_model_parallel_size=processes)
    spec = EngineSpec(config, ModelConfig(path=str(model)), (5,), pad_token_id=0, load_weights=True)
    actor = ray.remote(Replica).options(num_cpus=1, max_concurrency=1000).remote("vllm", spec, {})
    try:
        info = ray.get(actor.start.remote(), timeout=400)
        below = psutil.Process(info.pid).children(recursive=True)
        yield actor, [process for process in below if "VLLM::" in " ".join(process.cmdline())]
    finally:
        ray.kill(actor)


@pytest.mark.slow(40)
@pytest.mark.parametrize("victim", [0, -1], ids=["core", "worker"])
def test_every_call_fails_when_a_process_of_vllm_is_killed_inside_it(started_engines, tiny_model, victim) -> None:
    processes = 2 if victim else 1
    further: dict[str, Any] = {"call": ("hybridrl_note_process",)}
    if processes == 1:
        further["load_adapter"] = ("{}", {"base_model.model.x.lora_A.weight": torch.zeros(2, 2)})
    with started_engines(), replica_of(tiny_model, processes) as (actor, engine):
        all_fail(actor, engine, engine[victim], further, generating=True)


# Holds the policy's second update until it is let go.
HELD = """
import time
from pathlib import Path

from hybridrl.algorithms import get_policy_loss_fn, register_policy_loss

folder, calls = Path(__file__).parent, 0

@register_policy_loss("held")
def held(**inputs):
    global calls
    calls += 1
    if calls == 2:
        (folder / "held").touch()
        while not (folder / "go").exists():
            time.sleep(0.05)
    return get_policy_loss_fn("vanilla")(**inputs)
"""


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.mark.slow(60)
def test_a_run_whose_engine_dies_in_a_weight_update_ends_and_names_it(tiny_model, sort_data, tmp_path: Path) -> None:
    """Everything is started as a user does it. The step whose weights are sent is complete, and was saved."""
    (tmp_path / "held.py").write_text(HELD)
    words = [
        f"actor_rollout_ref.model.path={tiny_model}",
        f"actor_rollout_ref.model.external_lib={tmp_path / 'held.py'}",
        f"data.train_files={sort_data / 'train.parquet'}",
        "data.val_files=[]",
        "data.train_batch_size=8",
        "data.max_response_length=4",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.max_restarts=0",
        "actor_rollout_ref.actor.policy_loss.loss_mode=held",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "trainer.save_freq=1",
        "trainer.report=False",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    with open(tmp_path / "log", "w") as log:
        command = [sys.executable, "-m", "hybridrl.trainer.main_ppo", *words]
        run = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True)
    try:
        deadline = time.monotonic() + 500
        while not (tmp_path / "held").exists():
            assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-4000:]
            time.sleep(0.1)
        family = psutil.Process(run.pid).children(recursive=True)
        (core,) = [process for process in family if title_of(process).startswith("VLLM::EngineCore")]
        core.suspend()  # what sends the new weights to it waits
        (tmp_path / "go").touch()
        time.sleep(5)
        assert run.poll() is None
        core.kill()
        assert run.wait(LIMIT_S) not in (0, 75)
        output = (tmp_path / "log").read_text()
        assert "the engine died: " in output and "max_restarts=0" in output, output[-4000:]
        assert json.loads((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text()) == 2
        psutil.wait_procs(family, timeout=60)
        assert not [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
