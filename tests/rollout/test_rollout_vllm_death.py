"""vLLM's processes killed inside every call of a replica: each call fails at once, and the replica's process ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from replica_calls import all_fail

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.rollout.inference_engine import EngineSpec
from hybridrl.rollout.replicas.actor import Replica


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
