"""SGLang's scheduler killed inside every call of a replica: each call fails at once, and the replica's process ends."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import psutil
import pytest
import ray
from replica_calls import all_fail

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.rollout.inference_engine import EngineSpec
from hybridrl.rollout.replicas.replica_actor import Replica

if importlib.util.find_spec("sglang") is None:
    pytest.skip("runs in the SGLang environment", allow_module_level=True)


@pytest.mark.slow(60)
def test_every_call_fails_when_sglangs_scheduler_is_killed_inside_it(started_engines, tiny_model: Path) -> None:
    config = RolloutConfig(name="sglang", prompt_length=16, response_length=16, max_num_seqs=8)
    spec = EngineSpec(config, ModelConfig(path=str(tiny_model)), (5,), pad_token_id=0, load_weights=True)
    with started_engines():
        actor = ray.remote(Replica).options(num_cpus=1, max_concurrency=1000).remote("sglang", spec, {})
        try:
            info = ray.get(actor.start.remote(), timeout=400)
            below = psutil.Process(info.pid).children(recursive=True)
            engine = [process for process in below if "sglang::" in " ".join(process.cmdline())]
            (victim,) = [process for process in engine if "scheduler" in " ".join(process.cmdline())]
            all_fail(actor, engine, victim, {})
        finally:
            ray.kill(actor)
