"""Replicas and their pool: every request answered once, in order, whatever happens to a replica or to the weights."""

import asyncio
import os
import signal
import socket
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import openai
import psutil
import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_engine import BROKEN, DEADLY, HANGING, HANGS_VARIABLE, SLOW
from ray.exceptions import OutOfMemoryError

from hybridrl.config import load_config
from hybridrl.errors import RolloutError
from hybridrl.rollout.client import PoolClient
from hybridrl.rollout.inference_engine import EngineSpec
from hybridrl.rollout.replicas.balancer import Balancer
from hybridrl.rollout.replicas.pool import PoolSettings, ReplicaPlacement, ReplicaPool
from hybridrl.rollout.request import GUEST_PRIORITY, Request
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.rollout.server import make_server
from hybridrl.rollout.start import start_rollout
from hybridrl.single_controller import RayResourcePool
from hybridrl.weight_sync.send import SharedMemoryLane, stream

ENGINE = "plain_engine:PlainEngine"
SAMPLED = SamplingParams(True, 1.0, 1.0, -1, 12, ignore_eos=True)


@pytest.fixture(scope="module")
def slots(ray_session):
    pool = RayResourcePool([2], use_gpu=False)
    yield pool.slots()
    pool.release()


@pytest.fixture(scope="module")
def model(micro_model):
    """The trainer's model, whose weights tests change."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def make_pool(slots, micro_model, model, tmp_path_factory):
    """Makes pools of two replicas of the plain engine that get their weights from `model`."""
    made = []

    def make(replicas: int = 2, devices: tuple[int, ...] = (), hangs: str = "/nowhere", **changes) -> ReplicaPool:
        config = load_config(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={micro_model}",
                "actor_rollout_ref.rollout.prompt_length=16",
                "actor_rollout_ref.rollout.response_length=112",
                "actor_rollout_ref.rollout.max_num_seqs=64",
            ],
        ).actor_rollout_ref
        node = ray.get_runtime_context().get_node_id()
        path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])}
        path[HANGS_VARIABLE] = hangs
        places = [
            ReplicaPlacement(group, bundle, node, ranks=(rank,), environment=path, devices=devices)
            for rank, (group, bundle) in enumerate(slots[:replicas])
        ]
        spec = EngineSpec(config.rollout, config.model, eos_token_ids=(5,), pad_token_id=0)
        settings = PoolSettings(ENGINE, spec, log_folder=tmp_path_factory.mktemp("logs"), **changes)

        def send(targets):
            size = sum(p.numel() * 4 for p in model.parameters())
            return [stream(model.named_parameters(), [SharedMemoryLane(targets)], size, bucket_bytes=2**14)]

        pool = ReplicaPool(settings, places, send)
        made.append(pool)
        pool.start()
        pool.update_weights(0)
        return pool

    yield make
    for pool in made:
        pool.close()


@pytest.fixture(scope="module")
def shared_pool(make_pool):
    """One that all tests share which leave it whole."""
    return make_pool()


@pytest.fixture
def pool(shared_pool):
    """The shared one, idle and ready again behind a test that failed in between."""
    yield shared_pool
    shared_pool.abort()
    shared_pool.resume()
    shared_pool.unpause()
    until_ready(shared_pool)


def requests(count: int, prefix: str, first: int = 6, sampling: SamplingParams = SAMPLED) -> list[Request]:
    """Requests of different prompts; two of each session."""
    return [
        Request(f"{prefix}{i}", [first, 7 + i % 40, 8], sampling, session=f"{prefix}{i // 2}") for i in range(count)
    ]


def until_ready(pool: ReplicaPool) -> None:
    """Wait until all replicas have weights."""
    until(pool, ["ready"] * len(pool.placements))


def until(pool: ReplicaPool, states: list[str]) -> None:
    """Wait until the replicas are in these states."""
    deadline = time.monotonic() + 180
    while pool.health() != states:
        assert time.monotonic() < deadline, pool.health()
        time.sleep(0.1)


def until_each_generates(pool: ReplicaPool) -> None:
    """Wait until every replica is in the midst of a request; `SLOW` ones stay there for a while."""
    before, deadline = generated(pool), time.monotonic() + 60
    while any(now == then for now, then in zip(generated(pool), before, strict=True)):
        assert time.monotonic() < deadline, pool.statistics()
        time.sleep(0.02)


def generated(pool: ReplicaPool) -> list[float]:
    """Tokens of each replica so far."""
    return [part["generated_tokens"] for part in pool.statistics().values()]


def log_probs_of(model, request: Request, tokens: list[int]) -> torch.Tensor:
    """Of each token, by one plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([request.prompt_ids + tokens])).logits[0]
    every = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
    return every.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_every_request_is_answered_once_and_in_order(pool, model) -> None:
    asked = requests(40, "a")
    answers = pool.generate(asked)
    assert [answer.id for answer in answers] == [request.id for request in asked]
    for request, answer in zip(asked, answers, strict=True):
        assert answer.finish_reason == "length" and answer.versions == [(pool.version, 12)]
        torch.testing.assert_close(
            torch.tensor(answer.log_probs), log_probs_of(model, request, answer.token_ids), atol=1e-5, rtol=0
        )
    assert pool.take_peak() >= 40
    with pytest.raises(RolloutError, match="prompt is too long"):
        pool.generate([Request("long", list(range(6, 110)) * 2, SAMPLED)])
    assert len(pool.generate(requests(2, "after"))) == 2  # a refused request harms nobody


def test_weights_arrive_whole_in_small_buckets_and_requests_go_on_with_their_tokens(pool, model) -> None:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    long = SamplingParams(True, 1.0, 1.0, -1, 100, ignore_eos=True)
    asked = requests(8, "b", first=SLOW, sampling=long)
    futures = pool.submit(asked)
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


def test_what_no_replica_has_room_for_is_told(pool) -> None:
    pool.pause()
    futures = pool.submit(requests(200, "queue"))  # a window is 64 and a quarter
    assert pool.queued == 200 - 2 * 80
    assert [part["in_flight"] for part in pool.statistics().values()] == [80, 80]
    pool.abort()
    assert pool.queued == 0
    assert {future.result(timeout=60).finish_reason for future in futures} == {"abort"}
    pool.unpause()


def test_pausing_keeps_tokens_and_aborting_returns_them(pool) -> None:
    endless = SamplingParams(True, 1.0, 1.0, -1, 100, ignore_eos=True)
    futures = pool.submit(requests(4, "c", first=SLOW, sampling=endless))
    until_each_generates(pool)
    pool.pause()
    tokens = generated(pool)
    time.sleep(0.3)
    assert generated(pool) == tokens
    assert not any(future.done() for future in futures)
    pool.abort()
    answers = [future.result(timeout=60) for future in futures]
    assert {answer.finish_reason for answer in answers} <= {"abort", "length"}
    assert any(0 < len(answer.token_ids) < 100 for answer in answers)
    pool.unpause()
    assert len(pool.generate(requests(2, "d"))[0].token_ids) == 12


def test_a_killed_replica_is_started_again_and_no_sample_is_lost_or_doubled(pool, model) -> None:
    asked = requests(30, "e", first=SLOW, sampling=SamplingParams(True, 1.0, 1.0, -1, 40, ignore_eos=True))
    first, before = pool.replicas[0].info.pid, pool.restarts
    with ThreadPoolExecutor(1) as thread:
        generating = thread.submit(pool.generate, asked)
        until_each_generates(pool)
        os.kill(first, signal.SIGKILL)
        answers = generating.result()
    assert Counter(answer.id for answer in answers) == Counter(request.id for request in asked)
    assert all(len(answer.token_ids) == 40 for answer in answers) and pool.rerun
    until_ready(pool)
    assert pool.restarts == before + 1 and pool.replicas[0].info.pid != first
    for request, answer in zip(requests(20, "f"), pool.generate(requests(20, "f")), strict=True):
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
    futures = pool.submit(asked)
    until_each_generates(pool)
    before = [member.info.pid for member in pool.replicas]
    os.kill(before[0], signal.SIGKILL)
    until(pool, ["empty", "ready"])
    until_ready(pool)  # nobody calls `generate` or `update_weights`
    assert pool.replicas[0].info.pid != before[0]
    asked += (later := requests(20, "submit-later"))
    for request, future in zip(asked, [*futures, *pool.submit(later)], strict=True):
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


def test_a_process_is_lost_once_however_many_calls_to_it_fail(pool) -> None:
    before = pool.restarts
    process = pool.replicas[0].process()
    with pool.supervisor._lock:  # two calls fail before the restart has begun
        pool.supervisor.handle_loss(process, "its process ended")
        pool.supervisor.handle_loss(process, "its process ended, says another call")
    until_ready(pool)
    assert pool.restarts == before + 1


def test_a_replica_killed_during_an_update_gets_its_weights_later(pool, model, monkeypatch) -> None:
    send, victim, before = pool.supervisor._send_weights, pool.replicas[1].info.pid, pool.restarts

    def killing(targets):
        if len(targets) == 2:
            os.kill(victim, signal.SIGKILL)
        return send(targets)

    monkeypatch.setattr(pool.supervisor, "_send_weights", killing)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    pool.update_weights(pool.version + 1)
    until_ready(pool)
    assert pool.restarts == before + 1
    asked = requests(20, "update")
    for request, answer in zip(asked, pool.generate(asked), strict=True):
        assert answer.versions == [(pool.version, 12)]
        torch.testing.assert_close(
            torch.tensor(answer.log_probs), log_probs_of(model, request, answer.token_ids), atol=1e-5, rtol=0
        )


def test_while_memory_is_lent_nothing_runs_and_nothing_starts(make_pool) -> None:
    pool = make_pool(devices=(0,))
    pool.release()
    futures = pool.submit(requests(4, "lent"))
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
    pool.generate(requests(2, "other"))
    assert pool.health() == ["empty", "ready"]  # beside the other's cache there is no room to send weights
    pool.pause()
    pool.update_weights(2)
    assert pool.health() == ["ready", "ready"]
    waiting = pool.submit(requests(2, "paused"))
    time.sleep(0.5)
    assert not any(future.done() for future in waiting)  # an update does not undo a pause
    pool.unpause()
    assert [future.result(timeout=60).versions for future in waiting] == [[(2, 12)]] * 2


def test_the_only_replica_gets_its_weights_back_where_no_cache_is_in_the_way(make_pool) -> None:
    pool = make_pool(replicas=1, devices=(0,))
    with ThreadPoolExecutor(1) as thread:
        generating = thread.submit(pool.generate, requests(4, "alone", first=SLOW))
        until_each_generates(pool)
        os.kill(pool.replicas[0].info.pid, signal.SIGKILL)
        assert [answer.versions for answer in generating.result()] == [[(0, 12)]] * 4
    assert pool.restarts == 1 and pool.statistics()["0"]["loads_beside_cache"] == 0


@pytest.mark.parametrize("method", ["load_bucket", "release"])
def test_a_replica_that_hangs_while_memory_is_lent_is_ended(
    make_pool, monkeypatch, tmp_path: Path, method: str
) -> None:
    """Its process holds what others wait for: the trainer's bucket, or the device's memory."""
    monkeypatch.setattr("hybridrl.rollout.replicas.supervisor._HEALTH_EVERY_S", 0.2)
    hangs = tmp_path / "hangs"
    pool = make_pool(devices=(0,), hangs=str(hangs))
    pool.settings.stuck_timeout_s = 3.0
    victim = pool.replicas[1].info.pid
    hangs.write_text(f"{method} 1")
    pool.release()
    pool.resume(["weights"])
    pool.update_weights(1)
    assert not hangs.exists() and pool.health() == ["ready", "down"]
    wait_until_gone(victim)
    pool.resume(["kv_cache"])
    until(pool, ["ready", "empty"])
    pool.update_weights(2)
    assert {answer.versions[0][0] for answer in pool.generate(requests(8, method))} == {2}
    assert pool.restarts == 1 and set(pool.health()) == {"ready"}


def wait_until_gone(pid: int) -> None:
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=30)
    assert not psutil.pid_exists(pid)


def test_a_replica_that_ray_ends_for_lack_of_memory_is_lost_like_any_other(pool, monkeypatch) -> None:
    """Ray's error is none of an actor that died."""
    real, before = ray.get, pool.restarts
    errors = [OutOfMemoryError("the node runs out of memory")]

    def get(ref, **options):
        if options and errors:  # the first wait of the update
            raise errors.pop()
        return real(ref, **options)

    monkeypatch.setattr("hybridrl.rollout.replicas.supervisor.ray.get", get)
    pool.update_weights(pool.version + 1)
    until_ready(pool)
    assert not errors and pool.restarts == before + 1


def test_unpaused_while_a_replica_starts_it_generates(slots, micro_model, pool, monkeypatch) -> None:
    """A pool whose weights never change; the restart looked before, and pauses after `unpause`."""
    place = pool.replicas[0].placement
    spec = replace(pool.settings.spec, load_weights=True)
    other = ReplicaPool(PoolSettings(ENGINE, spec), [place])
    other.start()
    ask = other.supervisor._call

    def late(ups, method, *args):
        if method == "pause" and threading.current_thread().name.startswith("replica-restart"):
            other.unpause()
        return ask(ups, method, *args)

    try:
        other.pause()
        monkeypatch.setattr(other.supervisor, "_call", late)
        os.kill(other.replicas[0].info.pid, signal.SIGKILL)
        while other.health() == ["ready"]:
            time.sleep(0.05)
        (future,) = other.submit(requests(1, "unpaused"))
        assert len(future.result(timeout=300).token_ids) == 12
    finally:
        other.close()


def test_a_crash_loop_ends_with_the_engines_own_words(make_pool) -> None:
    pool = make_pool(replicas=1, max_restarts=1)
    with pytest.raises(RolloutError, match=r"failed 2 times without finishing a request .*max_restarts=1"):
        pool.generate(requests(1, "g", first=DEADLY))
    with pytest.raises(RolloutError, match="failed 2 times"):
        pool.generate(requests(1, "h"))
    assert "failed 2 times" in asyncio.run(PoolClient(pool).health())


def test_a_request_that_kills_every_replica_is_given_up_and_others_go_on(make_pool) -> None:
    pool = make_pool(max_restarts=1)
    with pytest.raises(RolloutError, match=r"failed: its replica was lost 2 times \(rollout.max_restarts=1\)"):
        pool.generate(requests(1, "j", first=DEADLY))
    until_ready(pool)
    assert len(pool.generate(requests(4, "k"))) == 4 and pool.restarts == 2


def test_a_stuck_engine_is_found_and_named(make_pool, monkeypatch) -> None:
    monkeypatch.setattr("hybridrl.rollout.replicas.supervisor._HEALTH_EVERY_S", 0.2)
    pool = make_pool(replicas=1, max_restarts=0)
    pool.settings.stuck_timeout_s = 3.0
    with pytest.raises(RolloutError, match=r"computed nothing for .*stuck_timeout_s"):
        pool.generate(requests(1, "i", first=HANGING))


def test_an_engine_that_does_not_start_says_why(slots, pool, tmp_path) -> None:
    broken = EngineSpec(pool.settings.spec.config, type(pool.settings.spec.model)(path=str(tmp_path)), (5,), 0)
    other = ReplicaPool(PoolSettings(ENGINE, broken), [pool.replicas[0].placement])
    with pytest.raises(RolloutError, match="replica 0 did not start"):
        other.start()
    other.close()


# ---------------------------------------------------------------- balancing


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=40),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_the_balancer_gives_every_request_once_and_never_too_many(groups, window, replicas) -> None:
    balancer = Balancer(window)
    asked = [
        Request(f"{number}-{i}", [1], SAMPLED, session=f"s{session}")
        for number, (session, size) in enumerate(groups)
        for i in range(size)
    ]
    balancer.add(asked)
    loads = dict.fromkeys(range(replicas), 0)
    given_out: list[str] = []
    while len(balancer):
        taken = balancer.take(loads)
        assert taken, "nothing was given although every replica has room"
        for index, found in taken.items():
            loads[index] += len(found)
            given_out += [request.id for request in found]
        assert max(loads.values()) <= window
        assert not len(balancer) or min(loads.values()) == window  # nobody idles while requests wait
        loads = dict.fromkeys(loads, 0)
    assert sorted(given_out) == sorted(request.id for request in asked)


def test_a_session_stays_where_it_was_and_new_ones_go_where_least_is_in_flight() -> None:
    balancer = Balancer(window=4)
    balancer.add([Request(f"a{i}", [1], SAMPLED, session="a") for i in range(3)])
    balancer.add([Request("b0", [1], SAMPLED, session="b")])
    taken = balancer.take({0: 0, 1: 0})
    assert [r.id for r in taken[0]] == ["a0", "a1", "a2"] and [r.id for r in taken[1]] == ["b0"]
    balancer.add([Request("a3", [1], SAMPLED, session="a"), Request("b1", [1], SAMPLED, session="b")])
    taken = balancer.take({0: 1, 1: 1})
    assert [r.id for r in taken[0]] == ["a3"] and [r.id for r in taken[1]] == ["b1"]
    balancer.forget(0)
    balancer.add([Request("a4", [1], SAMPLED, session="a")])
    assert list(balancer.take({0: 3, 1: 1})) == [1]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_the_queue_is_in_the_order_of_priority_then_of_arrival(entries) -> None:
    balancer = Balancer(window=2)
    expected: list[tuple[int, float, str]] = []
    for number, (priority, lost) in enumerate(entries):
        request = Request(str(number), [1], SAMPLED, priority=priority)
        balancer.add([request], first=lost)
        expected.append((priority, -number if lost else number + 0.5, request.id))
    order = [name for _, _, name in sorted(expected)]
    assert len(balancer) == len(order)
    taken = [request.id for request in balancer.take({0: 0}).get(0, [])]
    rest = [request.id for request in balancer.clear()]
    assert taken + rest == order and len(taken) == min(2, len(order)) and not len(balancer)


def test_a_lost_replicas_requests_come_before_those_that_waited() -> None:
    balancer = Balancer(window=10)
    balancer.add(requests(2, "late"))
    balancer.add(requests(2, "lost"), first=True)
    assert [request.id for request in balancer.take({0: 0})[0]] == ["lost0", "lost1", "late0", "late1"]


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
    take = pool.scheduler._balancer.take

    def noting(loads):
        given = take(loads)
        for index, found in given.items():
            for request in found:
                homes.setdefault(request.session, set()).add(index)
        return given

    monkeypatch.setattr(pool.scheduler._balancer, "take", noting)
    return PoolClient(pool), homes


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
    assert len(pool.generate(requests(2, "after-abort"))) == 2


def test_training_comes_before_guests(make_pool, monkeypatch) -> None:
    pool = make_pool(replicas=1)
    order: list[str] = []
    take = pool.scheduler._balancer.take

    def noting(loads):
        given = take(loads)
        order.extend(request.id for found in given.values() for request in found)
        return given

    monkeypatch.setattr(pool.scheduler._balancer, "take", noting)
    pool.pause()
    guests = [replace(request, priority=GUEST_PRIORITY) for request in requests(200, "guest")]
    futures = pool.submit(guests) + pool.submit(requests(30, "training"))
    window = len(order)  # at the replica already; nobody is sent away
    assert 0 < window < 200
    pool.unpause()
    assert all(len(future.result(timeout=300).token_ids) == 12 for future in futures)
    assert order[window : window + 30] == [f"training{number}" for number in range(30)] and len(order) == 230


def test_a_router_serves_the_pool_and_waits_while_its_memory_is_lent(pool) -> None:
    """The trainer's order: release, resume weights, new weights, resume the cache; requests keep their tokens."""
    spec, restarts = pool.settings.spec, pool.restarts
    server, access = make_server(spec.config, spec.model, PoolClient(pool))
    server.start_thread()
    root = access.url.removesuffix("/v1")
    client = openai.OpenAI(base_url=access.url, api_key=access.token, max_retries=0)

    def ask(number: int):
        return client.completions.create(
            model=access.model,
            prompt=[SLOW, 7 + number, 8],
            max_tokens=100,
            extra_body={"ignore_eos": True, "session_id": f"episode {number // 2}"},
        )

    try:
        with ThreadPoolExecutor(8) as threads:
            early = [threads.submit(ask, number) for number in range(4)]
            while sum(replica["running"] for replica in pool.statistics().values()) < 4:
                assert not any(future.done() for future in early)
            pool.release()
            late = [threads.submit(ask, number) for number in range(4, 8)]
            pool.resume(["weights"])
            pool.update_weights(pool.version + 1)
            pool.resume(["kv_cache"])
            answers = [future.result(120) for future in (*early, *late)]
        for answer in answers:
            (choice,) = answer.choices
            assert choice.finish_reason == "length" and len(choice.token_ids) == 100
            assert sum(tokens for _, tokens in choice.weights_versions) == 100
            assert choice.weights_versions[-1][0] == answer.weights_version == pool.version
        assert pool.restarts == restarts, "no replica generated without its memory"
        with urllib.request.urlopen(f"{root}/metrics") as page:
            text = page.read().decode()
        for replica in ("0", "1"):
            assert f'hybridrl_weights_version{{replica="{replica}"}} {float(pool.version)}' in text
            assert f'hybridrl_replica_restarts_total{{replica="{replica}"}}' in text
            assert f'hybridrl_requests_in_flight{{replica="{replica}"}} 0.0' in text
        assert 'hybridrl_requests_queued{replica="pool"} 0.0' in text
        assert urllib.request.urlopen(f"{root}/health").status == 200
        for address in pool.serve(access.token):
            alone = openai.OpenAI(base_url=f"http://{address}/v1", api_key=access.token, max_retries=0)
            answer = alone.completions.create(model=access.model, prompt=[6, 7, 8], max_tokens=5)
            assert answer.weights_version == pool.version
            with pytest.raises(openai.AuthenticationError):
                alone.with_options(api_key="another").models.list()
    finally:
        server.stop_thread()


def test_an_engine_that_breaks_over_its_own_address_is_started_again_without_its_port(make_pool) -> None:
    pool = make_pool(replicas=1)
    (address,) = pool.serve("a token of 16 letters")
    client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="a token of 16 letters", max_retries=0)
    (model,) = client.models.list().data
    assert client.completions.create(model=model.id, prompt=[6, 7, 8], max_tokens=5).choices
    old = pool.replicas[0].info.pid
    with pytest.raises(openai.APIConnectionError):
        client.completions.create(model=model.id, prompt=[BROKEN, 7, 8], max_tokens=5)
    wait_until_gone(old)
    with socket.create_server(("", int(address.rpartition(":")[2]))):  # somebody takes it
        until(pool, ["empty"])
        until_ready(pool)
    assert pool.restarts == 1


def test_a_taken_port_is_told_before_an_engine_is_started(slots, micro_model, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = [
            f"actor_rollout_ref.model.path={micro_model}",
            "actor_rollout_ref.rollout.prompt_length=16",
            "actor_rollout_ref.rollout.response_length=16",
            "actor_rollout_ref.rollout.server.enable=true",
            "actor_rollout_ref.rollout.server.host=127.0.0.1",
            f"actor_rollout_ref.rollout.server.port={taken.getsockname()[1]}",
        ]
        config = load_config("ppo_trainer", overrides=words).actor_rollout_ref
        config.rollout.name = ENGINE
        own = RayResourcePool([1], use_gpu=False)
        try:
            with pytest.raises(RolloutError, match=r"server\.port=\d+ on 127\.0\.0\.1 is taken"):
                start_rollout(config, None, own, log_folder=tmp_path)
        finally:
            own.release()
    assert not list(tmp_path.iterdir())
