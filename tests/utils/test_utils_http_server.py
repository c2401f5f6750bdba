"""The class of every server, attacked over real sockets; a client with the token is served meanwhile."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from http_attacks import ATTACKS, BAD_FRAMES, Address, answer_to

from hybridrl.utils.http_server import HttpRefusal, HttpServer, JsonApp, ServingLimits, TokenGuard, listening_socket

TOKEN = "open sesame"


class Echo:
    """A server that returns what it gets; `wait` keeps a request until its client vanishes."""

    def __init__(self, limits: ServingLimits) -> None:
        self.loop = asyncio.new_event_loop()
        self.began, self.gone = 0, 0
        routes = JsonApp({("POST", "/echo"): self.echo, ("POST", "/wait"): self.wait, ("GET", "/health"): self.health})
        listener = listening_socket("127.0.0.1", 0)
        self.address: Address = listener.getsockname()
        self.server = HttpServer(TokenGuard(routes, TOKEN, 2**20, "the limit"), listener, limits)
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.do(self.server.start())

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    async def echo(self, body: Any) -> tuple[int, dict[str, Any]]:
        if body == "no":
            raise HttpRefusal(422, "that is no")
        return 200, {"body": body}

    async def health(self, _: Any) -> tuple[int, dict[str, Any]]:
        return 200, {}

    async def wait(self, _: Any) -> tuple[int, dict[str, Any]]:
        self.began += 1
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.gone += 1
            raise
        return 200, {}

    def close(self) -> None:
        self.do(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)


@contextlib.contextmanager
def serving(**limits: Any) -> Iterator[Echo]:
    made = Echo(ServingLimits(**limits))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    with serving(connections=64, read_s=3.0, newcomer_s=0.5) as made:
        yield made


def post(address: Address, body: Any, path: str = "/echo", token: str = TOKEN, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {token}"} | headers)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def eventually(holds: Any, limit: float = 60.0) -> None:
    deadline = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_client_with_the_token_is_served_during_an_attack(echo: Echo, attack: Any) -> None:
    with attack(echo.address, "/echo"):
        for number in range(10):
            assert post(echo.address, number) == (200, {"body": number})
    eventually(lambda: len(echo.server.uvicorn.server_state.connections) == 0)


@pytest.mark.parametrize("data", BAD_FRAMES)
def test_what_is_no_request_is_refused(echo: Echo, data: bytes) -> None:
    answer = answer_to(echo.address, data)
    assert answer[9:10] in (b"4", b"") and answer.count(b"HTTP/1.1") <= 1
    assert post(echo.address, 1) == (200, {"body": 1})


@pytest.mark.parametrize("token", ["", "open", "open sesame!", "\u00e9"])
def test_a_wrong_token_is_refused_before_the_body(echo: Echo, token: str) -> None:
    head = f"POST /echo HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 1000000\r\n\r\n"
    with socket.create_connection(echo.address, timeout=60) as connection:
        connection.sendall(head.encode("latin-1"))
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


def test_refusals_of_the_application_and_of_bodies(echo: Echo) -> None:
    assert post(echo.address, "no") == (422, {"detail": "that is no"})
    assert post(echo.address, 1, "/other")[0] == 404
    assert post(echo.address, 1, **{"Content-Length": "9999999999"})[0] == 413


def test_requests_of_clients_that_vanish_are_cancelled(echo: Echo) -> None:
    """Also of those that send more behind their request, so that the server has something left to read."""
    for more in (b"", b"GET /health HTTP/1.1\r\n\r\n", b"x" * 300_000):
        before, connections = echo.began, []
        for _ in range(40):
            connection = socket.create_connection(echo.address, timeout=60)
            head = f"POST /wait HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 2\r\n\r\n{{}}"
            connection.sendall(head.encode())
            connections.append(connection)
        eventually(lambda before=before: echo.began == before + 40)
        for connection in connections:
            connection.sendall(more)
            connection.close()
        eventually(lambda: echo.gone == echo.began)


def test_a_share_of_connections_is_kept_for_clients_with_the_token() -> None:
    """Strangers that came first keep theirs; those beyond their share give way, and are told so."""
    with serving(connections=8, newcomer_s=30.0) as made, contextlib.ExitStack() as stack:
        address = made.address
        idle = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(8)]
        eventually(lambda: len(made.server.uvicorn.server_state.connections) == 8)
        good = http.client.HTTPConnection(*address, timeout=60)
        for number in range(3):  # over one connection, which is kept
            good.request("POST", "/echo", json.dumps(number), {"Authorization": f"Bearer {TOKEN}"})
            assert json.loads(good.getresponse().read()) == {"body": number}
        assert idle[6].recv(1000).startswith(b"HTTP/1.1 503"), "the first of those beyond the share"
        more = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(8)]
        assert more[0].recv(1000).startswith(b"HTTP/1.1 503")
        good.request("POST", "/echo", "3", {"Authorization": f"Bearer {TOKEN}"})
        assert json.loads(good.getresponse().read()) == {"body": 3}
        idle[0].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle[0].recv(1000).startswith(b"HTTP/1.1 200"), "strangers within their share are served"


def test_the_server_stops_while_clients_are_there() -> None:
    with serving(stop_s=1.0) as made, socket.create_connection(made.address, timeout=60):
        waiting = threading.Thread(target=lambda: found.append(post(made.address, 1, "/wait")))
        found: list[Any] = []
        waiting.start()
        eventually(lambda: made.began == 1)
        made.do(made.server.stop())
        waiting.join(60)
        assert made.gone == 1 and found[0][0] == 503
        with pytest.raises(OSError):
            socket.create_connection(made.address, timeout=5)
