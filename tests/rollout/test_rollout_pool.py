"""A pool of replicas: every request answered once, in order, under the weights that it says."""

import asyncio
import time
from dataclasses import replace

import pytest
import torch
from plain_engine import SLOW
from pool_tools import (
    SAMPLED,
    generated,
    log_probs_of,
    requests,
    until_each_generates,
)

from hybridrl.errors import RolloutError
from hybridrl.rollout.client import PoolClient
from hybridrl.rollout.request import CLIENT_PRIORITY, Request
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.utils.background import in_daemon_thread


def test_every_request_is_answered_once_and_in_order(pool, model) -> None:
    asked = requests(40, "a")
    answers = pool.scheduler.generate(asked)
    assert [answer.id for answer in answers] == [request.id for request in asked]
    for request, answer in zip(asked, answers, strict=True):
        assert answer.finish_reason == "length" and answer.versions == [(pool.version, 12)]
        torch.testing.assert_close(
            torch.tensor(answer.log_probs), log_probs_of(model, request, answer.token_ids), atol=1e-5, rtol=0
        )
    assert pool.scheduler.take_peak() >= 40
    with pytest.raises(RolloutError, match="prompt is too long"):
        pool.scheduler.generate([Request("long", list(range(6, 110)) * 2, SAMPLED)])
    assert len(pool.scheduler.generate(requests(2, "after"))) == 2  # a refused request harms nobody


def test_weights_arrive_whole_in_small_buckets_and_requests_go_on_with_their_tokens(pool, model) -> None:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    long = SamplingParams(True, 1.0, 1.0, -1, 100, ignore_eos=True)
    asked = requests(8, "b", first=SLOW, sampling=long)
    futures = pool.scheduler.submit(asked)
    until_each_generates(pool)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    old_version = pool.version
    pool.update_weights(old_version + 1)
    answers = [future.result(timeout=120) for future in futures]
    crossed = 0
    for request, answer in zip(asked, answers, strict=True):
        assert len(answer.token_ids) == 100 and sum(count for _, count in answer.versions) == 100
        assert [version for version, _ in answer.versions] in (
            [old_version],
            [old_version + 1],
            [old_version, old_version + 1],
        )
        new = log_probs_of(model, request, answer.token_ids)
        current = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.load_state_dict(before, strict=False)
        old = log_probs_of(model, request, answer.token_ids)
        model.load_state_dict(current, strict=False)
        by_version, start = [], 0
        for version, count in answer.versions:
            by_version.append((old if version == old_version else new)[start : start + count])
            start += count
        torch.testing.assert_close(torch.tensor(answer.log_probs), torch.cat(by_version), atol=1e-5, rtol=0)
        crossed += len(answer.versions) == 2
    assert crossed, "no request was in flight during the update"


def test_requests_of_work_that_nobody_waits_for_are_aborted(pool) -> None:
    """Those that a replica answers, and those that wait for one; requests of others are answered."""
    endless = SamplingParams(True, 1.0, 1.0, -1, 120, ignore_eos=True)
    dropped, others = requests(200, "dropped", first=SLOW, sampling=endless), requests(4, "others")
    before = sum(generated(pool))

    async def drop() -> None:
        work = asyncio.ensure_future(in_daemon_thread(pool.scheduler.generate, dropped))
        await asyncio.to_thread(until_each_generates, pool)
        assert pool.scheduler.queued
        answers = pool.scheduler.submit(others)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert {answer.result(60).finish_reason for answer in answers} == {"length"}

    asyncio.run(drop())
    deadline = time.monotonic() + 60
    while pool.scheduler.in_flight:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert sum(generated(pool)) - before < 200 * 120 / 2


def test_what_no_replica_has_room_for_is_told(pool) -> None:
    pool.pause()
    futures = pool.scheduler.submit(requests(200, "queue"))  # a window is 64 and a quarter
    assert pool.scheduler.queued == 200 - 2 * 80
    assert [part["in_flight"] for part in pool.statistics().values()] == [80, 80]
    pool.scheduler.abort()
    assert pool.scheduler.queued == 0
    assert {future.result(timeout=60).finish_reason for future in futures} == {"abort"}
    pool.unpause()


def test_pausing_keeps_tokens_and_aborting_returns_them(pool) -> None:
    endless = SamplingParams(True, 1.0, 1.0, -1, 100, ignore_eos=True)
    futures = pool.scheduler.submit(requests(4, "c", first=SLOW, sampling=endless))
    until_each_generates(pool)
    pool.pause()
    tokens = generated(pool)
    time.sleep(0.3)
    assert generated(pool) == tokens
    assert not any(future.done() for future in futures)
    pool.scheduler.abort()
    answers = [future.result(timeout=60) for future in futures]
    assert {answer.finish_reason for answer in answers} <= {"abort", "length"}
    assert any(0 < len(answer.token_ids) < 100 for answer in answers)
    pool.unpause()
    assert len(pool.scheduler.generate(requests(2, "d"))[0].token_ids) == 12


def test_a_client_aborts_single_requests_and_gives_up_calls(pool) -> None:
    long = SamplingParams(True, 1.0, 1.0, -1, 100, ignore_eos=True)
    client = PoolClient(pool)

    async def run() -> None:
        asked = requests(4, "client-abort", first=SLOW, sampling=long)
        tasks = [asyncio.ensure_future(client.generate(request)) for request in asked]
        while sum(replica["running"] for replica in (await client.stats()).values() if "running" in replica) < 4:
            await asyncio.sleep(0.02)
        await client.abort([asked[1].id, "unknown"])
        ended = await tasks[1]
        assert ended.finish_reason == "abort" and len(ended.token_ids) < 100
        tasks[2].cancel()  # the caller's own affair: the pool goes on
        for task in (tasks[0], tasks[3]):
            assert (await task).finish_reason == "length"
        assert await client.health() is None

    asyncio.run(run())
    assert len(pool.scheduler.generate(requests(2, "after-abort"))) == 2


def test_training_comes_before_guests(make_pool, monkeypatch) -> None:
    pool = make_pool(replicas=1)
    order: list[str] = []
    take = pool.scheduler.balancer.take

    def noting(*loads):
        given = take(*loads)
        order.extend(request.id for found in given.values() for request in found)
        return given

    monkeypatch.setattr(pool.scheduler.balancer, "take", noting)
    pool.pause()
    guests = [replace(request, priority=CLIENT_PRIORITY) for request in requests(200, "guest")]
    futures = pool.scheduler.submit(guests)
    window = len(order)  # at the replica already; nobody is sent away
    futures += pool.scheduler.submit(requests(30, "training"))
    assert 0 < window < 200
    pool.unpause()
    assert all(len(future.result(timeout=300).token_ids) == 12 for future in futures)
    assert order[window : window + 30] == [f"training{number}" for number in range(30)] and len(order) == 230
