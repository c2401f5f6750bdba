"""Clients that attack the server while a generation of training goes on in the process that started it."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from http_attacks import ATTACKS, BAD_FRAMES, answer_to
from plain_engine import SLOW, PlainEngine
from raising import raises_with

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.rollout import RolloutError
from hybridrl.rollout.request import CLIENT_PRIORITY, Completion, Request
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.serve import Access, make_server

CONNECTIONS = 64
#: opens so many connections, sends what is given over each, prints how many are open, and waits for its end
CROWD = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
open_ones = []
for _ in range(int(sys.argv[2])):
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=30)
    connection.sendall(sys.argv[3].encode())
    open_ones.append(connection)
print(len(open_ones), flush=True)
sys.stdin.read()
"""


class Run:
    """An engine that generates for training, with pauses that leave processor time to others, and a server process."""

    def __init__(self, model: Path, log: Path) -> None:
        self.rollout = RolloutConfig(prompt_length=1024, response_length=1024)
        self.rollout.server.host = "127.0.0.1"
        self.rollout.server.max_connections = CONNECTIONS
        self.engine = PlainEngine.of(model, max_model_len=2048)
        self.seen: list[Request] = []
        self.steps = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.do(self.engine.start())
        self.model = ModelConfig(path=str(model))
        self.server, self.access = make_server(self.rollout, self.model, self, log_file=log)
        self.server.start()
        self._training = asyncio.run_coroutine_threadsafe(self._train(), self._loop)
        self.server.wait_ready()
        self.client = openai.OpenAI(base_url=self.access.url, api_key=self.access.token, max_retries=0)

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _train(self) -> None:
        sampling = SamplingParams(True, 1.0, 1.0, -1, 4, ignore_eos=True)
        while True:
            completion = await self.engine.generate(Request(f"training-{self.steps}", [6, 7, 8], sampling))
            assert completion.finish_reason == "length"
            self.steps += 1
            await asyncio.sleep(0.25)

    async def _here(self, work: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def generate(self, request: Request) -> Completion:
        self.seen.append(request)
        found: Completion = await self._here(self.engine.generate(request))
        return found

    async def abort(self, ids: Any) -> None:
        await self._here(self.engine.abort(ids))

    async def stats(self) -> dict[str, dict[str, float]]:
        return {"0": self.engine.stats()}

    async def health(self) -> str | None:
        return None

    def trains(self) -> None:
        """Generation for training goes on."""
        before = self.steps
        eventually(lambda: self.steps > before + 3)

    def close(self) -> None:
        self._training.cancel()
        self.server.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture(scope="module")
def run(micro_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    found = Run(micro_model, tmp_path_factory.mktemp("log") / "server.log")
    yield found
    found.close()


def eventually(holds: Callable[[], bool], limit: float = 90.0, pause: float = 0.02) -> None:
    deadline = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(pause)


def served(run: Run) -> None:
    """A client with the token gets tokens."""
    assert run.client.completions.create(model=run.access.model, prompt=[5, 6], max_tokens=2).choices


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident(pid: int) -> int:
    found: int = psutil.Process(pid).memory_info().rss
    return found


@contextlib.contextmanager
def crowd(run: Run, count: int, text: str) -> Iterator[None]:
    command = [sys.executable, "-c", CROWD, str(run.server.listener.port), str(count), text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline().strip() == str(count)
            yield
        finally:
            process.kill()


def test_idle_connections_use_no_descriptors_of_the_run_and_end_by_themselves(run: Run) -> None:
    served(run)
    before = descriptors()
    with crowd(run, 600, ""), crowd(run, 600, "POST /v1/completions HTTP/1.1\r\nContent-Length: 9"):
        run.trains()
        assert descriptors() <= before + 8, "connections are the other process's"
        assert run.server.pid is not None
        eventually(lambda: _connections(run) <= CONNECTIONS, pause=1)
        eventually(lambda: _connections(run) == 0, pause=1)  # none sends a whole request
        served(run)


def _connections(run: Run) -> int:
    assert run.server.pid is not None
    found = psutil.Process(run.server.pid).net_connections("tcp")
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in found)


def test_connections_beyond_the_limit_are_told_so(run: Run) -> None:
    eventually(lambda: _connections(run) == 0, pause=0.5)
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS + 1):
            address = ("127.0.0.1", run.server.listener.port)
            connection = stack.enter_context(socket.create_connection(address, timeout=60))
        text = connection.makefile("rb").read().decode()
    assert text.startswith("HTTP/1.1 503 ") and json.loads(text.split("\r\n\r\n")[1])["error"]["code"] == "busy"
    eventually(lambda: _connections(run) == 0, pause=0.5)
    served(run)


def test_a_body_without_token_is_not_read(run: Run) -> None:
    served(run)
    assert run.server.pid is not None
    here, there = resident(os.getpid()), resident(run.server.pid)
    sent = 0
    with socket.create_connection(("127.0.0.1", run.server.listener.port), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
        with contextlib.suppress(OSError):
            while sent < 10**9:
                sent += connection.send(b" " * 2**16)
    assert sent < 10**8, "the server has closed the connection"
    run.trains()
    assert resident(run.server.pid) - there < 64 * 2**20
    assert resident(os.getpid()) - here < 64 * 2**20
    served(run)


def test_a_short_body_without_token_gets_its_answer(run: Run) -> None:
    request = urllib.request.Request(f"{run.access.url}/completions", data=b"{}" * 50_000, method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    assert caught.value.code == 401 and json.loads(caught.value.read())["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_with_token_is_bounded(run: Run, chunked: bool) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * 2**16

    connection = http.client.HTTPConnection("127.0.0.1", run.server.listener.port, timeout=60)
    headers = {"Authorization": f"Bearer {run.access.token}", "Content-Type": "application/json"}
    with contextlib.suppress(OSError):
        if chunked:
            connection.request("POST", "/v1/completions", parts(), headers, encode_chunked=True)
        else:
            connection.request("POST", "/v1/completions", b" " * 200 * 2**16, headers)
    answer = connection.getresponse()
    assert answer.status == 413 and json.loads(answer.read())["error"]["type"] == "invalid_request_error"
    connection.close()
    served(run)


def test_a_long_head_is_refused(run: Run) -> None:
    with socket.create_connection(("127.0.0.1", run.server.listener.port), timeout=60) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 10**6)
        with contextlib.suppress(ConnectionResetError):
            assert b" 400 " in connection.recv(100)
    served(run)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_client_is_served_during_an_attack(run: Run, attack: Any) -> None:
    with attack(("127.0.0.1", run.server.listener.port), "/v1/completions"):
        served(run)
        run.trains()
        served(run)


def test_bad_framing_is_refused(run: Run) -> None:
    for data in BAD_FRAMES:
        assert answer_to(("127.0.0.1", run.server.listener.port), data)[9:10] in (b"4", b"")
    served(run)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(("wait_s", "more"), [(0.0, ""), (0.1, ""), (0.5, ""), (0.5, "GET /health HTTP/1.1\r\n\r\n")])
def test_streams_of_clients_that_vanish_are_aborted(run: Run, path: str, more: str, wait_s: float) -> None:
    """All 40, whenever their clients go, and whatever these sent after their request."""
    served(run)
    run.seen.clear()
    before = set(run.engine.aborted)
    asked = {"prompt": [SLOW, 6]} if path == "completions" else {"messages": [{"role": "user", "content": "?"}]}
    body = json.dumps({"model": run.access.model, "stream": True, "max_tokens": 1000, "ignore_eos": True, **asked})
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {run.access.token}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connections = [socket.create_connection(("127.0.0.1", run.server.listener.port), timeout=60) for _ in range(40)]
    for connection in connections:
        connection.sendall((head + body + more).encode())
    time.sleep(wait_s)
    for connection in connections:
        connection.close()
    served(run)
    eventually(lambda: _connections(run) <= 1)
    eventually(lambda: not any(name.startswith(("cmpl", "chatcmpl")) for name in run.engine.running), limit=20)
    started = {request.id for request in run.seen if request.sampling.max_new_tokens == 1000}
    assert started or wait_s < 0.5
    assert started <= set(run.engine.aborted) - before


def test_a_hostile_template_and_a_long_prompt_are_refused_at_once(run: Run) -> None:
    template = "{% set a = 'x' * 10**9 %}{% for i in range(10**9) %}{{ a }}{% endfor %}"
    for extra in ({"chat_template": template}, {"chat_template_kwargs": {"chat_template": template}}):
        with pytest.raises(openai.BadRequestError, match=next(iter(extra))):
            run.client.chat.completions.create(
                model=run.access.model, messages=[{"role": "user", "content": "a"}], extra_body=extra
            )
    with pytest.raises(openai.BadRequestError, match="4000000 bytes"):
        run.client.completions.create(model=run.access.model, prompt="a" * 4_000_000)
    run.trains()
    served(run)


def test_a_client_is_a_guest_whatever_it_says(run: Run) -> None:
    run.seen.clear()
    run.client.completions.create(
        model=run.access.model, prompt=[5, 6], max_tokens=1, extra_body={"priority": -5, "session_id": "episode 1"}
    )
    (request,) = run.seen
    assert (request.priority, request.session) == (CLIENT_PRIORITY, "episode 1")


def test_a_pause_holds_clients_and_no_training(run: Run) -> None:
    """Neither the run's own requests nor those of its agents."""
    root, sent = run.access.url.removesuffix("/v1"), {"Authorization": f"Bearer {run.access.token}"}
    own = httpx.post(f"{root}/sessions", headers=sent).json()["id"]
    run.server.take_session(own, run.generate)
    agent = openai.OpenAI(base_url=f"{root}/sessions/{own}/v1", api_key="-", max_retries=0)
    with ThreadPoolExecutor(1) as threads:
        assert httpx.post(f"{root}/pause", params={"mode": "keep"}, headers=sent).json() == {"status": "paused"}
        run.seen.clear()
        client = threads.submit(served, run)
        agent.completions.create(model="any", prompt=[5, 6], max_tokens=2)
        run.trains()
        assert [request.session for request in run.seen] == [own] and not client.done()
        assert httpx.post(f"{root}/resume", headers=sent).json() == {"status": "resumed"}
        client.result(60)
    run.server.leave_session(own)


def test_the_process_is_restarted_at_its_address_and_the_run_is_told(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    served(run)
    first = run.server.pid
    assert first is not None
    calls = threading.Thread(target=_call_slowly, args=[run])
    calls.start()
    eventually(lambda: any(name.startswith("cmpl") for name in run.engine.running))
    os.kill(first, signal.SIGSEGV)
    calls.join(60)
    eventually(lambda: not any(name.startswith("cmpl") for name in run.engine.running))  # they were aborted
    eventually(lambda: run.server.pid != first and _answers(run))
    run.trains()
    served(run)
    told = capfd.readouterr().err
    assert "SIGSEGV" in told and f"restarts at 127.0.0.1:{run.server.listener.port}" in told


def _call_slowly(run: Run) -> None:
    with contextlib.suppress(openai.OpenAIError):
        run.client.completions.create(
            model=run.access.model, prompt=[SLOW, 6], max_tokens=1000, extra_body={"ignore_eos": True}
        )


def _answers(run: Run) -> bool:
    try:
        return bool(run.client.models.list().data)
    except openai.OpenAIError:
        return False


def test_a_process_that_cannot_start_is_an_error_with_its_log(run: Run, tmp_path: Path) -> None:
    server, _ = make_server(run.rollout, ModelConfig(path=str(tmp_path / "none")), run, log_file=tmp_path / "log")
    server.start()
    with pytest.raises(RolloutError, match=r"does not start\nThe end of .*log:(.|\n)*none"):
        server.wait_ready()
    server.stop()


def test_a_process_that_does_not_get_on_with_its_start_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridrl.utils.movement.USER_STILL_S", 2.0)
    server, _ = make_server(run.rollout, run.model, run, log_file=tmp_path / "log")
    server.start()
    eventually(lambda: server.pid is not None)
    psutil.Process(server.pid).suspend()
    with raises_with(RolloutError, f"process {server.pid}"):
        server.wait_ready()
    server.stop()
    assert not psutil.pid_exists(server.pid)


@pytest.mark.slow
def test_the_server_ends_with_the_run(micro_model: Path, tmp_path: Path) -> None:
    program = f"""
import os, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from pathlib import Path
from test_rollout_server_attacks import Run
run = Run(Path({str(micro_model)!r}), Path({str(tmp_path / "log")!r}))
print(run.server.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    output = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True).stdout
    eventually(lambda: not psutil.pid_exists(int(output)))


def test_the_access_file_is_its_owners_and_no_link_is_followed(tmp_path: Path) -> None:
    access = Access("http://127.0.0.1:1/v1", "secret", "model")
    foreign = tmp_path / "foreign"
    foreign.write_text("kept")
    foreign.chmod(0o644)
    run = tmp_path / "run"
    run.mkdir()
    (run / "server.json").symlink_to(foreign)
    path = access.write(run)
    assert foreign.read_text() == "kept" and not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    access.write(run)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    Access("http://127.0.0.1:2/v1", "other", "model").remove(run)
    assert path.exists(), "it belongs to another run"
    access.remove(run)
    assert not list(run.iterdir())
    access.remove(run)
