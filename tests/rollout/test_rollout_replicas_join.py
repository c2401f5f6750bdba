"""Replicas that join a pool wherever Ray has room. Those that leave with a node are in test_trainer_spot_nodes.py."""

from __future__ import annotations

import os
import signal

import torch
from plain_engine import SLOW
from pool_tools import log_probs_of, requests, until, until_ready, until_restarted
from ray.util import placement_group_table

from hybridrl.rollout.replicas.replica_number import ReplicaBounds


def reserved() -> int:
    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


def test_a_replica_joins_and_is_like_the_others(make_pool, model) -> None:
    before = reserved()
    pool = make_pool(replicas=1, bounds=ReplicaBounds(1, 2, 600.0))
    futures = pool.scheduler.submit(requests(100, "more-than-a-window", first=SLOW))  # of 80
    until(pool, ["ready", "ready"])
    assert pool.replicas_joined == 1 and {len(future.result(timeout=120).token_ids) for future in futures} == {12}
    asked = requests(20, "both")
    for request, answer in zip(asked, pool.scheduler.generate(asked), strict=True):
        assert answer.versions == [(0, 12)]
        torch.testing.assert_close(
            torch.tensor(answer.log_probs), log_probs_of(model, request, answer.token_ids), atol=1e-5, rtol=0
        )
    assert all(part["prompt_tokens"] > 0 for part in pool.statistics().values())
    # Its node lives, so one that is lost is started again, and does not leave.
    pid = pool.replicas[1].info.pid
    os.kill(pid, signal.SIGKILL)
    until_restarted(pool, 1, pid)
    until_ready(pool)
    assert (pool.replicas_joined, pool.replicas_left, pool.restarts) == (1, 0, 1)
    assert reserved() == before + 1
    pool.close()
    assert reserved() == before


def test_a_replica_that_does_not_start_leaves_and_the_others_go_on(make_pool) -> None:
    before = reserved()
    pool = make_pool(replicas=1, bounds=ReplicaBounds(1, 2, 600.0), join_environment={"PYTHONPATH": "/nowhere"})
    until(pool, ["ready", "gone"])
    assert len(pool.scheduler.generate(requests(4, "alone"))) == 4
    assert (pool.replicas_joined, pool.replicas_left, pool.restarts) == (0, 0, 0)
    assert reserved() == before, "its place is free again"
    pool.update_weights(1)
    assert pool.health() == ["ready", "gone"] and list(pool.statistics()) == ["0"]
