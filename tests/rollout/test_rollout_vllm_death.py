"""vLLM's processes killed inside every call of a replica: each call fails at once, and the replica's process ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.rollout.inference_engine import EngineSpec
from hybridrl.rollout.replicas.actor import Replica
from hybridrl.rollout.request import Request
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.weight_sync.messages import Checkpoint

LIMIT_S = 120  # of a call; `stuck_timeout_s` is 300
SAMPLED = SamplingParams(True, 1.0, 1.0, -1, 8, ignore_eos=True)
#: method and arguments, besides `generate`; each calls into the engine's processes
CALLS = {
    "begin_update": (),
    "requirements": (Checkpoint({}, {}),),
    "end_update": (1,),
    "call": ("hybridrl_note_process",),
}


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


def all_fail(actor: ray.actor.ActorHandle, engine: list[psutil.Process], victim: psutil.Process) -> None:
    """Make every call while the engine's processes are stopped, so that it is inside, and kill one of them."""
    for process in engine:
        process.suspend()
    pending = {"generate": actor.generate.remote(Request("pending", [6, 7, 8], SAMPLED))}
    time.sleep(1)
    ray.get(actor.pause.remote(), timeout=LIMIT_S)  # vLLM aborts without its core
    pending |= {name: getattr(actor, name).remote(*arguments) for name, arguments in CALLS.items()}
    ended = ray.wait(list(pending.values()), num_returns=len(pending), timeout=3)[0]
    assert not [name for name, call in pending.items() if call in ended]
    victim.kill()
    for name, call in pending.items():
        with pytest.raises(ActorDiedError):
            ray.get(call, timeout=LIMIT_S)
            pytest.fail(f"{name} ended as if nothing had happened")


@pytest.mark.slow(40)
@pytest.mark.parametrize("victim", [0, -1], ids=["core", "worker"])
def test_every_call_fails_when_a_process_of_vllm_is_killed_inside_it(started_engines, tiny_model, victim) -> None:
    with started_engines(), replica_of(tiny_model, 2 if victim else 1) as (actor, engine):
        all_fail(actor, engine, engine[victim])
        psutil.wait_procs(engine, timeout=LIMIT_S)
        assert not [process for process in engine if process.is_running() and process.status() != "zombie"]
