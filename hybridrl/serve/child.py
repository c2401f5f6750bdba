"""The process that serves a run over HTTP: `python -m hybridrl.serve.child SOCKET LISTENER`.

`ServerProcess` starts it. Both arguments are descriptors: a socket to the run, and the socket that listens. Standard
input carries the `ServerSetup`. Clients are not trusted: whatever they exhaust (memory, descriptors, the interpreter's
time) is exhausted here, and not in the run. The process ends when the run does.
"""

import asyncio
import contextlib
import os
import pickle
import resource
import socket
import sys
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from hybridrl.errors import RolloutError
from hybridrl.rollout.request import Completion, Request
from hybridrl.serve import wire
from hybridrl.serve.app import create_app
from hybridrl.serve.client_images import ClientImage, ShownImages
from hybridrl.serve.gate import PauseMode
from hybridrl.serve.http import OpenAIServer
from hybridrl.serve.process import ServerSetup
from hybridrl.serve.start_servers import served_model

_NICENESS = 5
_OWN_DESCRIPTORS = 128
_STATE_S = 1.0  # health and statistics are asked for once within this time, however many clients ask

T = TypeVar("T")


class RunClient:
    """A `GenerationClient` that calls the run, where the gate is.

    Args:
        reader, writer: of the socket to the run.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._count = 0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._sent: weakref.WeakSet[ClientImage] = weakref.WeakSet()
        self._stats = _Recent(lambda: self._call("stats"))
        self._health = _Recent(lambda: self._call("health"))

    async def listen(self) -> None:
        """Pass the run's answers on, until it ends the server."""
        while True:
            message = await wire.receive(self._reader)
            if message.get("close"):
                return
            call = self._calls.pop(message["call"])
            if call.done():
                continue
            if message["error"] is None:
                call.set_result((message["value"], message["data"]))
            else:
                call.set_exception(RolloutError(message["error"]))

    def report_ready(self) -> None:
        """Report to the run that clients are served."""
        wire.send(self._writer, {"method": "ready"})

    async def _call(self, method: str, argument: Any = None) -> Any:
        return (await self._answered(method, argument))[0]

    async def _answered(self, method: str, argument: Any = None) -> tuple[Any, bytes]:
        """The answer to a call, and the bytes after it."""
        self._count += 1
        number = self._count
        self._calls[number] = asyncio.get_running_loop().create_future()
        wire.send(self._writer, {"call": number, "method": method, "argument": argument})
        answer: tuple[Any, bytes] = await self._calls[number]
        return answer

    async def generate(self, request: Request) -> Completion:
        plain, images = wire.request_to_plain(request), request.images
        if isinstance(images, ShownImages):
            for picture in images.pictures:
                self._send_once(picture)
            plain["images"] = {"numbers": [image.number for image in images.pictures], "places": images.places}
        return wire.completion_from_plain(*await self._answered("generate", plain))

    def _send_once(self, picture: ClientImage) -> None:
        """Send an image to the run, which keeps it until nothing here has it any more."""
        if picture in self._sent:
            return
        self._sent.add(picture)
        wire.send(self._writer, *wire.image_to_plain(picture.number, picture.tensors))
        loop, message = asyncio.get_running_loop(), {"method": "forget", "number": picture.number}
        weakref.finalize(picture, _in_loop, loop, wire.send, self._writer, message)  # it may go in any thread

    async def abort(self, ids: Sequence[str]) -> None:
        await self._call("abort", list(ids))

    async def pause(self, mode: PauseMode) -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def is_paused(self) -> bool:
        return bool(await self._call("is_paused"))

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        stats: Mapping[str, Mapping[str, float]] = await self._stats.get()
        return stats

    async def health(self) -> str | None:
        fault: str | None = await self._health.get()
        return fault


def _in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and the run gone
        loop.call_soon_threadsafe(function, *arguments)


class _Recent:
    """An answer that several callers share for a short time."""

    def __init__(self, ask: Callable[[], Awaitable[Any]]) -> None:
        self._ask = ask
        self._lock = asyncio.Lock()
        self._until = 0.0
        self._value: Any = None

    async def get(self) -> Any:
        async with self._lock:
            if time.monotonic() > self._until:
                self._value = await self._ask()
                self._until = time.monotonic() + _STATE_S
            return self._value


async def _serve(setup: ServerSetup, connection: socket.socket, listening: socket.socket, max_connections: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    client = RunClient(reader, writer)
    served = served_model(setup)
    limits = setup.rollout.server
    app = create_app(
        client,
        served,
        setup.token,
        max_requests=limits.max_requests,
        max_sessions=limits.max_sessions,
        session_idle_s=limits.session_idle_s,
        gate=client,
        max_body_mb=limits.max_body_mb,
    )
    server = OpenAIServer(app, listening, max_connections)
    await server.start()
    client.report_ready()
    try:
        await client.listen()
    except (asyncio.IncompleteReadError, ConnectionError):  # the run has ended, and nobody waits for this process
        os._exit(0)
    await server.stop()


def _be_modest(max_connections: int) -> int:
    """Leave processor and memory to training, and find out how many connections there are descriptors for."""
    os.nice(_NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # where memory runs out, this process goes first
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = max_connections + _OWN_DESCRIPTORS
    limit = descriptors if most == resource.RLIM_INFINITY else min(descriptors, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    return max(1, limit - _OWN_DESCRIPTORS)


def main() -> None:
    """Serve until the run ends."""
    connection, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    setup: ServerSetup = pickle.load(sys.stdin.buffer)
    max_connections = _be_modest(setup.rollout.server.max_connections)
    asyncio.run(_serve(setup, connection, listening, max_connections))


if __name__ == "__main__":
    main()
