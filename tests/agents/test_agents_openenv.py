"""The client of OpenEnv's servers, against a process that answers as openenv 0.10.0 did."""

import asyncio
import contextlib
import http.client
import json
import multiprocessing
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from http_attacks import ATTACKS
from rollout_stage import ROLLOUT, config_for, prompts_of
from template_families import FAMILIES
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from hybridrl.agents.environments.environment import Action
from hybridrl.agents.environments.environment_server import EnvironmentServer
from hybridrl.agents.environments.install import pinned_file, python_of
from hybridrl.agents.environments.load_environments import load_environments
from hybridrl.agents.environments.openenv import OpenEnvEnvironment, OpenEnvError
from hybridrl.errors import RolloutError
from hybridrl.utils.http_server import HttpServer, ServingLimits, TokenGuard, listening_socket

STAGE = Path(__file__).with_name("openenv_stage.py")
CONFIG = {"app": "openenv_stage:app", "folder": str(STAGE.parent), "python": sys.executable}
TEXT = {"action_field": "message", "observation_field": "echoed", "max_sessions": 2}


@pytest.fixture(scope="module")
def config():
    """Of a server that runs."""
    found = OpenEnvEnvironment.start({**CONFIG, **TEXT})
    yield found
    OpenEnvEnvironment.stop(found)


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_an_episode_over_the_wire(config) -> None:
    async def play():
        environment = OpenEnvEnvironment(**config)
        kwargs = {"name": "x", "difficulty": 2, "other": None}
        steps = [await environment.reset({"seed": 5, "env_kwargs": kwargs})]
        steps += [await environment.step(Action(text)) for text in ("hello", "you")]
        await environment.close()
        return steps

    first, second, third = asyncio.run(play())
    assert first.observation == 'ready True {"difficulty": 2}' and first.reward is None and not first.done
    assert (second.observation, second.reward, second.done) == ("hello", 0.5, False)
    assert (third.observation, third.reward, third.done) == ("you", 0.3, True)
    assert third.extra == {"metadata": {"n": 2}, "state": {"episode_id": "", "step_count": 2}}


def test_errors_of_actions_are_for_the_model_and_those_of_the_server_are_not(config) -> None:
    async def play():
        environment = OpenEnvEnvironment(**config | {"action_field": None, "observation_field": None})
        try:
            told = [(await environment.reset({"seed": 1})).observation]
            told += [(await environment.step(Action(text))).observation for text in ("{", "[1]", "{}")]
            told.append((await environment.step(Action('{"message": "é"}'))).observation)
            with pytest.raises(OpenEnvError, match="it broke"):
                await environment.step(Action('{"message": "fail"}'))
        finally:
            await environment.close()
        return told

    told = asyncio.run(play())
    assert told[0] == '{"echoed": "ready True {}"}' and told[4] == '{"echoed": "é"}'
    assert "no JSON:" in told[1] and "no JSON object" in told[2] and "message: Field required" in told[3]


@contextlib.contextmanager
def server_of_others():
    """The address of a server that others run, without a token."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = [sys.executable, "-m", "uvicorn", "openenv_stage:app", "--fd", str(listener.fileno())]
        process = subprocess.Popen(words, cwd=STAGE.parent, pass_fds=[listener.fileno()])
        port = listener.getsockname()[1]
    until = time.monotonic() + 60
    while not answers(port):
        assert time.monotonic() < until
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.mark.parametrize("told", [True, False])
def test_sessions_wait_for_a_place_on_the_server(config, told) -> None:
    """Six at once on a server that takes two, which the settings say or not."""

    async def play(number: int):
        environment = OpenEnvEnvironment(**config if told else config | {"key": "unknown", "url": url, "app": None})
        try:
            await environment.reset({"seed": 1})
            await asyncio.sleep(0.05)
            return (await environment.step(Action(str(number)))).observation
        finally:
            await environment.close()

    async def together():
        return await asyncio.gather(*(play(number) for number in range(6)))

    with contextlib.ExitStack() as stack:
        url = None if told else stack.enter_context(server_of_others())
        assert asyncio.run(together()) == [str(number) for number in range(6)]


def test_a_server_that_dies_spoils_its_sessions_only_and_starts_again(started, model, tmp_path, capsys) -> None:
    file = tmp_path / "environments.yaml"
    settings = "".join(f"    {name}: {value}\n" for name, value in {**CONFIG, **TEXT}.items())
    file.write_text(f"environments:\n- name: echo\n  class_name: openenv\n  config:\n{settings}")
    rollout, _ = started(
        config_for(
            model,
            FAMILIES["qwen"].template,
            f"{ROLLOUT}.agent.default_agent_loop=env_agent",
            f"{ROLLOUT}.multi_turn.function_tool_path=null",
            f"{ROLLOUT}.agent.environment_config_path={file}",
            f"{ROLLOUT}.agent.environment_turn_tokens=8",
            f"{ROLLOUT}.agent.retries=0",
        )
    )
    (server,) = OpenEnvEnvironment.servers.values()
    first = rollout.generate(prompts_of(rollout, 3))
    assert all(first.non_tensor_batch["env_done"]) and first.batch["turn_level_rewards"].sum() > 0
    before = server.port()
    server.process.kill()
    server.process.wait()
    assert not answers(before)
    second = rollout.generate(prompts_of(rollout, 3))
    assert all(second.non_tensor_batch["env_done"]) and "it starts again" in capsys.readouterr().err

    async def die():
        environment = OpenEnvEnvironment(**rollout.agents.environments.entries["echo"].config)
        await environment.reset({"seed": 1})
        try:
            await environment.step(Action("die"))
        finally:
            await environment.close()

    with pytest.raises(ConnectionClosedError, match="close"):
        asyncio.run(die())
    port = server.port()
    assert answers(port)
    rollout.close()
    assert not answers(port)


ENDS_SLOWLY = """
import os, time

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        for name in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{name}.complete"})
        return
    if scope["path"] == "/end":
        os.closerange(3, 1024)
        while not os.path.exists("may_end"):
            time.sleep(0.05)
        os._exit(3)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})
"""


def test_a_server_that_is_ending_is_not_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its sockets are closed before the process has ended."""
    (tmp_path / "ends_slowly.py").write_text(ENDS_SLOWLY)
    server = EnvironmentServer(Path(sys.executable), "ends_slowly:app", tmp_path, 100)
    try:
        port = server.port()
        with pytest.raises((OSError, http.client.HTTPException)):
            url = f"http://127.0.0.1:{port}/end"
            urllib.request.urlopen(urllib.request.Request(url, headers=server.headers), timeout=30)
        with pytest.raises(ConnectionRefusedError):  # the request's connection may be closed before what listens
            while True:
                socket.create_connection(("127.0.0.1", port), timeout=30).close()
        assert server.process is not None and server.process.poll() is None
        threading.Timer(1.5, (tmp_path / "may_end").touch).start()
        assert answers(server.port()) and "ended with status 3; it starts again" in capsys.readouterr().err
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server():
    """A server, and its address."""
    made = EnvironmentServer(Path(sys.executable), "openenv_stage:app", STAGE.parent, 100)
    yield made, ("127.0.0.1", made.port())
    made.stop()


def test_a_server_serves_those_who_have_its_token(server) -> None:
    """Other users of the machine, and agents, could play and score episodes."""

    async def kind_of(headers: dict[str, str]) -> str:
        async with connect(f"ws://{host}:{port}/ws", proxy=None, additional_headers=headers) as opened:
            await opened.send(json.dumps({"type": "state"}))
            return str(json.loads(await opened.recv())["type"])

    made, (host, port) = server
    assert asyncio.run(kind_of(made.headers)) == "state"
    for headers in ({}, {"Authorization": "Bearer other"}):
        with pytest.raises(InvalidStatus, match="403"):
            asyncio.run(kind_of(headers))
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/docs", headers=headers), timeout=30)
    with urllib.request.urlopen(f"http://{host}:{port}/health", timeout=30) as answer:
        assert answer.status == 200


@pytest.fixture(scope="module")
def served():
    """The configuration of a server of its own."""
    made = OpenEnvEnvironment.start({**CONFIG, **TEXT, "start_timeout_s": 99})
    yield made
    OpenEnvEnvironment.stop(made)


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_episode_goes_on_during_an_attack(served, attack) -> None:
    """Idle connections, and requests without end, filled it."""

    async def play() -> float | None:
        environment = OpenEnvEnvironment(**served)
        await environment.reset({"seed": 5})
        step = await environment.step(Action("hello"))
        await environment.close()
        return step.reward

    port = OpenEnvEnvironment.servers[served["key"]].port()
    with attack(("127.0.0.1", port), "/ws"):
        assert asyncio.run(play()) == 0.5


def test_a_websocket_that_is_open_outlives_the_time_for_requests() -> None:
    """The time for a request ends with the upgrade, and the others count the connection."""

    async def app(scope, receive, send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})

    async def talk() -> list[str]:
        listener = listening_socket("127.0.0.1", 0)
        limits = ServingLimits(connections=3, read_s=0.2, newcomer_s=0.2)
        server = HttpServer(TokenGuard(app, "t", 2**20, "the limit"), listener, limits, whole_asgi=True)
        await server.start()
        url, headers = f"ws://127.0.0.1:{listener.getsockname()[1]}/", {"Authorization": "Bearer t"}
        async with (
            connect(url, proxy=None, additional_headers=headers) as one,
            connect(url, proxy=None, additional_headers=headers) as other,
        ):
            await asyncio.sleep(0.6)
            for open_one in (one, other):
                await open_one.send("still")
            said = [str(await open_one.recv()) for open_one in (one, other)]
        await server.stop()
        return said

    assert asyncio.run(talk()) == ["still", "still"]


def serve_and_wait(told) -> None:
    told.send(EnvironmentServer(Path(sys.executable), "openenv_stage:app", STAGE.parent, 100).port())
    time.sleep(1000)


def test_a_server_ends_with_the_trainer_however_that_ends() -> None:
    forks = multiprocessing.get_context("fork")
    ours, theirs = forks.Pipe()
    trainer = forks.Process(target=serve_and_wait, args=(theirs,), daemon=True)
    trainer.start()
    port = ours.recv()
    assert answers(port)
    trainer.kill()
    trainer.join()
    until = time.monotonic() + 60
    while answers(port):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_what_cannot_work_is_refused(tmp_path, monkeypatch) -> None:
    for config, reason in (
        ({}, "one of url"),
        ({"url": "http://x", "app": "y:app"}, "one of url"),
        ({"url": "http://x", "colour": 1}, "config.colour=1"),
        ({**CONFIG, "app": "no_such_module:app"}, "no_such_module"),
    ):
        with pytest.raises(RolloutError, match=reason):
            OpenEnvEnvironment.start(config)
    file = tmp_path / "environments.yaml"
    file.write_text("environments:\n- class_name: openenv\n")
    with pytest.raises(RolloutError, match="openenv: config needs one of url"):
        load_environments(str(file), None, [])
    with pytest.raises(RolloutError, match="openenv"):
        pinned_file("nothing")


def test_the_environment_of_a_server_is_made_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HYBRIDRL_ENVIRONMENTS", str(tmp_path / "made"))
    pinned = tmp_path / "pinned.txt"
    pinned.write_text("# nothing\n")
    python = python_of("openenv", pinned=pinned)
    where = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert Path(where.stdout.strip()) == python.parents[1]
    stamp = (python.parents[1] / "complete").stat().st_mtime_ns
    assert python_of("openenv", pinned=pinned) == python
    assert (python.parents[1] / "complete").stat().st_mtime_ns == stamp
    pinned.write_text("--no-index\nno-such-package-at-all==0.0.0\n")
    with pytest.raises(RolloutError, match=r"pip .*install .* failed"):
        python_of("openenv", pinned=pinned)
    names = {line.partition("==")[0] for line in pinned_file("openenv").read_text().splitlines()}
    assert {"openenv", "uvicorn", "websockets"} <= names and "torch" not in names
