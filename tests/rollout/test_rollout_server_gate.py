"""vLLM's control routes: who may end, hold and ask for what, and what becomes of requests that are held."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_stage import TOKEN, Stage

from hybridrl.rollout.request import GREEDY_TOKEN, Completion, Request
from hybridrl.serve.pending import PendingRequests

PROMPT = [5, 6, 7]
LONG = {"max_tokens": 400, "temperature": 0, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def stage(micro_model: Path) -> Iterator[Stage]:
    stage = Stage(micro_model)
    yield stage
    stage.close()


@pytest.fixture
def owner(stage: Stage) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stage.root, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as client:
        yield client
        client.post("/resume")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as found:
        yield found


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ask(client: httpx.Client, name: str, key: str = TOKEN, **sampling: Any) -> dict[str, Any]:
    body = {"request_id": name, "token_ids": PROMPT, "sampling_params": LONG | sampling}
    answer = client.post("/inference/v1/generate", json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def running(stage: Stage) -> bool:
    return bool(stage.engine.running)


def session(owner: httpx.Client) -> str:
    id: str = owner.post("/sessions").json()["id"]
    return id


def test_kept_requests_go_on_behind_their_tokens(
    stage: Stage, owner: httpx.Client, threads: ThreadPoolExecutor
) -> None:
    whole = ask(owner, "alone")
    stage.seen.clear()
    interrupted = threads.submit(ask, owner, "one")
    eventually(lambda: running(stage))
    assert owner.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
    assert not running(stage) and not interrupted.done()
    later = threads.submit(ask, owner, "two", max_tokens=3)
    eventually(lambda: owner.get("/metrics").status_code == 200)
    assert owner.get("/is_paused").json() == {"is_paused": True}
    assert not running(stage) and not later.done() and len(stage.seen) == 1
    assert owner.post("/resume").json() == {"status": "resumed"}
    found = interrupted.result(60)
    assert found["token_ids"] == whole["token_ids"], "as if it had not been held"
    told = [[entry["logprob"] for entry in one["logprobs"]["content"]] for one in (found, whole)]
    assert told[0] == pytest.approx(told[1], abs=1e-4)
    assert found["weight_versions"] == [{"version": "3", "start": 0, "end": 400}]
    assert later.result(60)["token_ids"] == whole["token_ids"][:3]
    assert owner.get("/is_paused").json() == {"is_paused": False}
    done = [request for request in stage.seen if len(request.prompt_ids) > len(PROMPT)]
    assert len(done) == 1 and done[0].prompt_ids == [*PROMPT, *found["token_ids"]][: len(done[0].prompt_ids)]


def test_what_pausing_does_to_requests_in_flight(
    stage: Stage, owner: httpx.Client, threads: ThreadPoolExecutor
) -> None:
    cut = threads.submit(ask, owner, "one")
    eventually(lambda: running(stage))
    owner.post("/pause")  # vLLM's default aborts
    found = cut.result(60)
    assert found["finish_reason"] == "abort" and len(found["token_ids"]) < 400
    owner.post("/resume")
    complete = threads.submit(ask, owner, "two", max_tokens=60)
    eventually(lambda: running(stage))
    owner.post("/pause", params={"mode": "wait"})
    assert not running(stage)
    assert len(complete.result(60)["token_ids"]) == 60
    refused = owner.post("/pause", params={"mode": "stop"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "mode"


def test_a_held_stop_string_is_found_where_the_parts_meet(
    stage: Stage, owner: httpx.Client, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine sees the second half of the string alone."""
    text = stage.engine.tokenizer.decode(ask(owner, "alone", max_tokens=12)["token_ids"])
    first, pieces = asyncio.Event(), list[list[int]]()
    ids = stage.engine.tokenizer.encode(text, add_special_tokens=False)
    stop = stage.engine.tokenizer.decode(ids[2:4])

    async def in_two(self: Stage, request: Request) -> Completion:
        pieces.append(request.prompt_ids)
        if len(pieces) == 1:
            await first.wait()
            return Completion(request.id, ids[:3], [-0.5] * 3, "abort", [(3, 3)])
        return Completion(request.id, ids[3:8], [-0.25] * 5, "length", [(4, 2), (5, 3)])

    async def abort(self: Stage, ids: Any) -> None:
        first.set()

    monkeypatch.setattr(Stage, "generate", in_two)
    monkeypatch.setattr(Stage, "abort", abort)
    interrupted = threads.submit(ask, owner, "one", stop=[stop])
    eventually(lambda: bool(pieces))
    owner.post("/pause", params={"mode": "keep"})
    owner.post("/resume")
    found = interrupted.result(60)
    assert (found["token_ids"], found["finish_reason"]) == (ids[:4], "stop")
    assert pieces[1] == [*PROMPT, *ids[:3]]
    assert [span["version"] for span in found["weight_versions"]] == ["3", "4"]


def test_calls_are_aborted_by_their_names(stage: Stage, owner: httpx.Client, threads: ThreadPoolExecutor) -> None:
    """Each session ends its own calls, and the run's token those of all."""
    mine, other = session(owner), session(owner)
    calls: dict[str, Future[Any]] = {key: threads.submit(ask, owner, "same", key) for key in (mine, other, TOKEN)}
    eventually(lambda: len(stage.engine.running) == 3)

    def abort(key: str, *names: str) -> int:
        sent = {"Authorization": f"Bearer {key}"}
        answer = owner.post("/inference/v1/abort_requests", json={"request_ids": list(names)}, headers=sent)
        assert answer.status_code == 200 and answer.json()["status"] == "aborted"
        count: int = answer.json()["aborted"]
        return count

    assert abort(mine, "another", "") == 0
    assert abort(mine, "same") == 1
    assert calls[mine].result(60)["finish_reason"] == "abort"
    assert owner.get(f"/sessions/{mine}").json()["turns"] == 0, "it is no turn"
    assert len(stage.engine.running) == 2 and not calls[other].done()
    assert abort(TOKEN, "same") == 2
    assert {call.result(60)["finish_reason"] for call in calls.values()} == {"abort"}
    assert abort(TOKEN, "same") == 0
    missing = owner.post("/inference/v1/abort_requests", json={})
    assert missing.status_code == 400 and missing.json()["error"]["param"] == "request_ids"


def test_held_calls_can_be_aborted_too(stage: Stage, owner: httpx.Client, threads: ThreadPoolExecutor) -> None:
    owner.post("/pause")
    held = threads.submit(ask, owner, "held")
    eventually(
        lambda: owner.post("/inference/v1/abort_requests", json={"request_ids": ["held"]}).json()["aborted"] == 1
    )
    assert (held.result(60)["finish_reason"], held.result()["token_ids"]) == ("abort", [])


def test_a_session_asks_and_the_run_alone_holds(stage: Stage, owner: httpx.Client) -> None:
    id = session(owner)
    bare = httpx.Client(base_url=stage.root)
    as_session = {"Authorization": f"Bearer {id}"}
    for path in ("/pause", "/resume"):
        assert bare.post(path).status_code == 401
        assert bare.post(path, headers=as_session).status_code == 401
        assert bare.post(f"/sessions/{id}{path}", headers=as_session).status_code == 404
    assert owner.get("/is_paused").json() == {"is_paused": False}
    for path, answer in (("/is_paused", {"is_paused": False}), ("/weight_info", {"weight_version": "3"})):
        assert bare.get(path).status_code == 401
        assert bare.get(path, headers=as_session).json() == answer
        assert owner.get(path).json() == answer


def test_weights_that_nobody_has_are_no_version(
    stage: Stage, owner: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stats(self: Stage) -> dict[str, dict[str, float]]:
        return {"0": {"weights_version": 8.0}, "1": {"weights_version": 7.0}, "pool": {"queued": 0.0}}

    monkeypatch.setattr(Stage, "stats", stats)
    assert owner.get("/weight_info").json() == {"weight_version": "7"}, "the oldest that generates"

    async def none(self: Stage) -> dict[str, dict[str, float]]:
        return {"pool": {"queued": 1.0}}

    monkeypatch.setattr(Stage, "stats", none)
    assert owner.get("/weight_info").status_code == 503


def test_requests_are_with_the_client_before_they_can_be_aborted_by_name() -> None:
    seen: list[str] = []

    class Client:
        async def generate(self, request: Request) -> Completion:
            seen.append(request.id)
            return Completion(request.id, [], [], "stop")

    class Connection:
        async def receive(self) -> dict[str, str]:
            return await asyncio.get_running_loop().create_future()

    @contextlib.contextmanager
    def named() -> Iterator[None]:
        assert seen == ["a", "b"]
        yield

    async def call() -> int:
        requests = [Request(id, [1], GREEDY_TOKEN) for id in ("a", "b")]
        async with PendingRequests(Client(), requests, Connection(), named()) as pending:  # type: ignore[arg-type]
            return len(await pending.completed())

    assert asyncio.run(call()) == 2
