"""Every call of a replica that its engine's processes answer, made while they are stopped, and what follows a kill."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError

from hybridrl.hybrid_engine.buckets import Bucket, Checkpoint
from hybridrl.rollout.request import Request
from hybridrl.rollout.sampling import SamplingParams

LIMIT_S = 120  # of a call; `stuck_timeout_s` is 300
_SAMPLED = SamplingParams(True, 1.0, 1.0, -1, 8, ignore_eos=True)
#: method and arguments
CALLS: dict[str, tuple[Any, ...]] = {
    "begin_update": (),
    "required_slices": (Checkpoint({}, {}),),
    "load_bucket": (Bucket("shared_memory", "none", ()),),
    "end_update": (1,),
}
#: those that wait for nothing, here without devices; afterwards they have to fail, too
AT_ONCE: dict[str, tuple[Any, ...]] = {
    "health": (),
    "stats": (),
    "abort": (),
    "pause": (),
    "release": (["weights", "kv_cache"],),
    "resume": (["weights", "kv_cache"],),
    "unpause": (),
}


def all_fail(
    actor: ray.actor.ActorHandle,
    engine: list[psutil.Process],
    victim: psutil.Process,
    further: dict[str, tuple[Any, ...]],
    generating: bool = False,
) -> None:
    """Make every call while the engine's processes are stopped, so that it is inside, and kill one of them.

    Args:
        further: calls that this engine has besides `CALLS`.
        generating: with a request in flight, where the engine aborts it without its core.
    """
    pending = {}
    if not generating:
        ray.get(actor.pause.remote(), timeout=LIMIT_S)
    for process in engine:
        process.suspend()
    if generating:
        pending["generate"] = actor.generate.remote(Request("pending", [6, 7, 8], _SAMPLED))
        time.sleep(1)
        ray.get(actor.pause.remote(), timeout=LIMIT_S)
    calls = CALLS | further
    pending |= {name: getattr(actor, name).remote(*arguments) for name, arguments in calls.items()}
    ended = ray.wait(list(pending.values()), num_returns=len(pending), timeout=3)[0]
    early = [name for name, call in pending.items() if call in ended]
    assert not early, early
    ray.get(actor.health.remote(), timeout=LIMIT_S)
    victim.kill()
    for name, call in pending.items():
        with pytest.raises(ActorDiedError):
            ray.get(call, timeout=LIMIT_S)
            pytest.fail(f"{name} ended as if nothing had happened")
    for name, arguments in AT_ONCE.items():
        with pytest.raises(ActorDiedError):
            ray.get(getattr(actor, name).remote(*arguments), timeout=LIMIT_S)
    psutil.wait_procs(engine, timeout=LIMIT_S)
    assert not [process for process in engine if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
