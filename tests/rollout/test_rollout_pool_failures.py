"""Replicas that are killed, hang, crash or do not start: no request is lost, and no weights are wrong."""

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
import torch
from plain_engine import DEADLY, HANGING, SLOW
from pool_tools import (
    ENGINE,
    SAMPLED,
    log_probs_of,
    requests,
    until,
    until_each_generates,
    until_ready,
    until_restarted,
    wait_until_gone,
)
from raising import raises_with
from ray.exceptions import OutOfMemoryError

from hybridrl.errors import RolloutError
from hybridrl.rollout.client import PoolClient
from hybridrl.rollout.inference_engine import EngineSpec
from hybridrl.rollout.replicas.replica_handle import PoolSettings
from hybridrl.rollout.replicas.replica_supervisor import Supervisor
from hybridrl.rollout.request import Request
from hybridrl.rollout.sampling import SamplingParams


def test_a_killed_replica_is_started_again_and_no_sample_is_lost_or_doubled(pool, model, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = requests(30, "e", first=SLOW, sampling=SamplingParams(True, 1.0, 1.0, -1, 40, ignore_eos=True))
    first, before = pool.replicas[0].info.pid, pool.restarts
    with ThreadPoolExecutor(1) as thread:
        generating = thread.submit(pool.scheduler.generate, asked)
        until_each_generates(pool)
        os.kill(first, signal.SIGKILL)
        answers = generating.result()
    assert Counter(answer.id for answer in answers) == Counter(request.id for request in asked)
    assert all(len(answer.token_ids) == 40 for answer in answers) and pool.scheduler.rerun
    until_ready(pool)
    assert pool.restarts == before + 1 and pool.replicas[0].info.pid != first
    assert psutil.Process(pool.replicas[0].info.pid).cwd() == str(tmp_path)
    for request, answer in zip(requests(20, "f"), pool.scheduler.generate(requests(20, "f")), strict=True):
        # the new process has the trainer's weights, not the folder's
        torch.testing.assert_close(
            torch.tensor(answer.log_probs), log_probs_of(model, request, answer.token_ids), atol=1e-5, rtol=0
        )


def test_a_replica_restarted_under_submit_alone_gets_its_weights(pool, model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    pool.update_weights(pool.version + 1)
    asked = requests(8, "submit", first=SLOW)
    futures = pool.scheduler.submit(asked)
    until_each_generates(pool)
    before = [member.info.pid for member in pool.replicas]
    os.kill(before[0], signal.SIGKILL)
    until_restarted(pool, 0, before[0])
    until_ready(pool)  # nobody calls `generate` or `update_weights`
    asked += (later := requests(20, "submit-later"))
    for request, future in zip(asked, [*futures, *pool.scheduler.submit(later)], strict=True):
        answer = future.result(timeout=120)
        assert answer.versions == [(pool.version, 12)]
        torch.testing.assert_close(
            torch.tensor(answer.log_probs), log_probs_of(model, request, answer.token_ids), atol=1e-5, rtol=0
        )


def test_weights_that_training_is_changing_are_not_sent(pool, model) -> None:
    pool.weights_will_change()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    os.kill(pool.replicas[0].info.pid, signal.SIGKILL)
    until(pool, ["empty", "ready"])
    time.sleep(2)
    assert pool.health() == ["empty", "ready"]
    pool.update_weights(pool.version + 1)
    assert pool.health() == ["ready", "ready"]


def test_a_replica_that_is_lost_after_a_lent_cache_gets_its_weights(pool) -> None:
    """The trainer has its weights still: nothing else is to happen before a restarted replica may have them."""
    pool.release(["kv_cache"])
    pool.resume(["kv_cache"])
    before = pool.replicas[0].info.pid
    os.kill(before, signal.SIGKILL)
    until_restarted(pool, 0, before)
    until_ready(pool)
    assert len(pool.scheduler.generate(requests(4, "lent"))) == 4


def test_a_process_is_lost_once_however_many_calls_to_it_fail(pool) -> None:
    before = pool.restarts
    process = pool.replicas[0].process()
    with pool._lock:  # two calls fail before the restart has begun
        pool.handle_loss(process, "its process ended")
        pool.handle_loss(process, "its process ended, says another call")
    until_ready(pool)
    assert pool.restarts == before + 1


def test_a_replica_killed_during_an_update_gets_its_weights_later(pool, model, monkeypatch) -> None:
    send, victim, before = pool._send_weights, pool.replicas[1].info.pid, pool.restarts

    def killing(targets):
        if len(targets) == 2:
            os.kill(victim, signal.SIGKILL)
        return send(targets)

    monkeypatch.setattr(pool, "_send_weights", killing)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    pool.update_weights(pool.version + 1)
    until_ready(pool)
    assert pool.restarts == before + 1
    asked = requests(20, "update")
    for request, answer in zip(asked, pool.scheduler.generate(asked), strict=True):
        assert answer.versions == [(pool.version, 12)]
        torch.testing.assert_close(
            torch.tensor(answer.log_probs), log_probs_of(model, request, answer.token_ids), atol=1e-5, rtol=0
        )


def test_while_memory_is_lent_nothing_runs_and_nothing_starts(make_pool) -> None:
    pool = make_pool(devices=(0,))
    pool.weights_will_change()
    pool.release()
    futures = pool.scheduler.submit(requests(4, "lent"))
    os.kill(pool.replicas[0].info.pid, signal.SIGKILL)
    until(pool, ["down", "ready"])
    time.sleep(1.5)
    assert pool.health() == ["down", "ready"] and not any(future.done() for future in futures)
    pool.resume(["weights"])
    assert not any(future.done() for future in futures)  # there is no room for keys and values yet
    pool.update_weights(1)
    pool.resume()
    assert [len(future.result(timeout=60).token_ids) for future in futures] == [12] * 4
    until(pool, ["empty", "ready"])
    pool.scheduler.generate(requests(2, "other"))
    assert pool.health() == ["empty", "ready"]  # beside the other's cache there is no room to send weights
    pool.pause()
    pool.update_weights(2)
    assert pool.health() == ["ready", "ready"]
    waiting = pool.scheduler.submit(requests(2, "paused"))
    time.sleep(0.5)
    assert not any(future.done() for future in waiting)  # an update does not undo a pause
    pool.unpause()
    assert [future.result(timeout=60).versions for future in waiting] == [[(2, 12)]] * 2


def test_the_only_replica_gets_its_weights_back_where_no_cache_is_in_the_way(make_pool) -> None:
    pool = make_pool(replicas=1, devices=(0,))
    with ThreadPoolExecutor(1) as thread:
        generating = thread.submit(pool.scheduler.generate, requests(4, "alone", first=SLOW))
        until_each_generates(pool)
        os.kill(pool.replicas[0].info.pid, signal.SIGKILL)
        assert [answer.versions for answer in generating.result()] == [[(0, 12)]] * 4
    assert pool.restarts == 1 and pool.statistics()["0"]["loads_beside_cache"] == 0


@pytest.mark.parametrize("method", ["load_bucket", "release"])
def test_a_replica_that_hangs_while_memory_is_lent_is_ended(
    make_pool, monkeypatch, tmp_path: Path, method: str
) -> None:
    """Its process holds what others wait for: the trainer's bucket, or the device's memory."""
    monkeypatch.setattr("hybridrl.rollout.replicas.replica_supervisor._HEALTH_EVERY_S", 0.2)
    hangs = tmp_path / "hangs"
    pool = make_pool(devices=(0,), hangs=str(hangs))
    pool.settings.stuck_timeout_s = 3.0
    victim = pool.replicas[1].info.pid
    hangs.write_text(f"{method} 1")
    pool.weights_will_change()
    pool.release()
    pool.resume(["weights"])
    pool.update_weights(1)
    assert not hangs.exists() and pool.health() == ["ready", "down"]
    wait_until_gone(victim)
    pool.resume(["kv_cache"])
    until(pool, ["ready", "empty"])
    pool.update_weights(2)
    assert {answer.versions[0][0] for answer in pool.scheduler.generate(requests(8, method))} == {2}
    assert pool.restarts == 1 and set(pool.health()) == {"ready"}


def test_a_replica_that_ray_ends_for_lack_of_memory_is_lost_like_any_other(pool, monkeypatch) -> None:
    """Ray's error is none of an actor that died."""
    real, before = ray.get, pool.restarts
    errors = [OutOfMemoryError("the node runs out of memory")]

    def get(ref, **options):
        if options and errors:  # the first wait of the update
            raise errors.pop()
        return real(ref, **options)

    monkeypatch.setattr("hybridrl.rollout.replicas.replica_supervisor.ray.get", get)
    pool.update_weights(pool.version + 1)
    until_ready(pool)
    assert not errors and pool.restarts == before + 1


def test_unpaused_while_a_replica_starts_it_generates(slots, micro_model, pool, monkeypatch) -> None:
    """A pool whose weights never change; the restart looked before, and pauses after `unpause`."""
    place = pool.replicas[0].placement
    spec = replace(pool.settings.spec, load_weights=True)
    other = Supervisor(PoolSettings(ENGINE, spec), [place])
    other.start()
    ask = other._call

    def late(ups, method, *args):
        if method == "pause" and threading.current_thread().name.startswith("replica-restart"):
            other.unpause()
        return ask(ups, method, *args)

    try:
        other.pause()
        monkeypatch.setattr(other, "_call", late)
        os.kill(other.replicas[0].info.pid, signal.SIGKILL)
        while other.health() == ["ready"]:
            time.sleep(0.05)
        (future,) = other.scheduler.submit(requests(1, "unpaused"))
        assert len(future.result(timeout=300).token_ids) == 12
    finally:
        other.close()


def test_a_crash_loop_ends_with_the_engines_own_words(make_pool) -> None:
    pool = make_pool(replicas=1, max_restarts=1)
    with raises_with(RolloutError, "2 times", "max_restarts=1"):
        pool.scheduler.generate(requests(1, "g", first=DEADLY))
    with pytest.raises(RolloutError, match="failed 2 times"):
        pool.scheduler.generate(requests(1, "h"))
    assert "failed 2 times" in asyncio.run(PoolClient(pool).health())


def test_a_request_that_kills_every_replica_is_given_up_and_others_go_on(make_pool) -> None:
    pool = make_pool(max_restarts=1)
    with raises_with(RolloutError, "2 times", "(rollout.max_restarts=1)"):
        pool.scheduler.generate(requests(1, "j", first=DEADLY))
    until_ready(pool)
    assert len(pool.scheduler.generate(requests(4, "k"))) == 4 and pool.restarts == 2


def test_a_stuck_engine_is_found_and_named(make_pool, monkeypatch) -> None:
    monkeypatch.setattr("hybridrl.rollout.replicas.replica_supervisor._HEALTH_EVERY_S", 0.2)
    pool = make_pool(replicas=1, max_restarts=0)
    pool.settings.stuck_timeout_s = 3.0
    with raises_with(RolloutError, "stuck_timeout_s"):
        pool.scheduler.generate(requests(1, "i", first=HANGING))


def test_an_engine_that_does_not_start_says_why(slots, pool, tmp_path) -> None:
    broken = EngineSpec(pool.settings.spec.config, type(pool.settings.spec.model)(path=str(tmp_path)), (5,), 0)
    other = Supervisor(PoolSettings(ENGINE, broken), [pool.replicas[0].placement])
    with pytest.raises(RolloutError, match="replica 0 did not start"):
        other.start()
    other.close()


def test_many_sessions_of_several_turns_survive_a_lost_replica(pool, model, monkeypatch) -> None:
    """Each turn's prompt is all tokens before and a tool's answer; a session stays at its replica."""
    client, homes = pool_client_and_homes(pool, monkeypatch)
    victim, restarts = pool.replicas[0].info.pid, pool.restarts
    turns: list[tuple[Request, list[int], list[float]]] = []

    async def session(number: int) -> None:
        ids = [SLOW, 7 + number, 8]
        for turn in range(3):
            request = Request(f"session{number}-{turn}", ids, SAMPLED, session=f"session{number}")
            answer = await client.generate(request)
            assert answer.finish_reason == "length" and answer.versions == [(pool.version, 12)]
            turns.append((request, answer.token_ids, answer.log_probs))
            ids = [*ids, *answer.token_ids, 20 + turn]

    async def everything(kill: bool) -> None:
        running = [asyncio.ensure_future(session(number + 16 * kill)) for number in range(16)]
        if kill:
            while len(turns) < 48 + 8:
                await asyncio.sleep(0.01)
            os.kill(victim, signal.SIGKILL)
        await asyncio.gather(*running)

    asyncio.run(everything(kill=False))
    assert {name for name, found in homes.items() if len(found) > 1} == set()  # two replicas, each its sessions
    assert len(set.union(*homes.values())) == 2
    asyncio.run(everything(kill=True))
    until_ready(pool)
    assert pool.restarts == restarts + 1 and len(turns) == 2 * 16 * 3
    for request, tokens, log_probs in turns:
        torch.testing.assert_close(torch.tensor(log_probs), log_probs_of(model, request, tokens), atol=1e-5, rtol=0)


def pool_client_and_homes(pool, monkeypatch) -> tuple[PoolClient, dict[str, set[int]]]:
    """A client, and the replicas that each session's requests go to from now on."""
    homes: dict[str, set[int]] = {}
    take = pool.scheduler.balancer.take

    def noting(*loads):
        given = take(*loads)
        for index, found in given.items():
            for request in found:
                homes.setdefault(request.session, set()).add(index)
        return given

    monkeypatch.setattr(pool.scheduler.balancer, "take", noting)
    return PoolClient(pool), homes
