"""The process that serves a run over HTTP: `main` in a process of its own.

`ServerProcess` starts it, with the socket that listens, and sends the `ServerSetup`. Clients are not trusted: whatever
they exhaust (memory, descriptors, the interpreter's time) is exhausted here, and not in the run. The process ends when
the run does.
"""

import asyncio
import contextlib
import os
import pickle
import resource
import socket
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from hybridrl.errors import RolloutError
from hybridrl.processes.child import end_with_run
from hybridrl.processes.frame_stream import FrameStream
from hybridrl.processes.frames import FrameConnection
from hybridrl.processes.peer import JSON, Peer
from hybridrl.rollout.request import Completion, Request
from hybridrl.serve import server_messages
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
        stream: the connection to the run.
    """

    def __init__(self, stream: FrameStream) -> None:
        self._close = asyncio.Event()
        self._run = Peer(stream, JSON, {"close": self._close.set}, RolloutError)
        self._serving: asyncio.Future[None] | None = None
        self._sent: weakref.WeakSet[ClientImage] = weakref.WeakSet()
        self._stats = _Recent(lambda: self._run.call("stats"))
        self._health = _Recent(lambda: self._run.call("health"))

    async def listen(self) -> None:
        """Take the run's answers, until it ends the server.

        Raises:
            EOFError: the run has ended.
        """
        closing = asyncio.ensure_future(self._close.wait())
        serving = asyncio.ensure_future(self._run.serve())
        await asyncio.wait({closing, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        self._serving = serving  # calls in progress are answered until the process ends

    def report_ready(self) -> None:
        """Report to the run that clients are served."""
        self._run.tell("ready")

    async def generate(self, request: Request) -> Completion:
        plain, images = server_messages.request_to_plain(request), request.images
        if isinstance(images, ShownImages):
            for picture in images.pictures:
                self._send_once(picture)
            plain["images"] = {"numbers": [image.number for image in images.pictures], "places": images.places}
        return server_messages.completion_from_plain(await self._run.call("generate", plain))

    def _send_once(self, picture: ClientImage) -> None:
        """Send an image to the run, which keeps it until nothing here has it any more."""
        if picture in self._sent:
            return
        self._sent.add(picture)
        self._run.tell("image", picture.number, server_messages.image_to_plain(picture.tensors))
        loop, number = asyncio.get_running_loop(), picture.number
        weakref.finalize(picture, _in_loop, loop, self._run.tell, "forget", number)  # it may go in any thread

    async def abort(self, ids: Sequence[str]) -> None:
        await self._run.call("abort", list(ids))

    async def pause(self, mode: PauseMode) -> None:
        await self._run.call("pause", mode)

    async def resume(self) -> None:
        await self._run.call("resume")

    async def is_paused(self) -> bool:
        return bool(await self._run.call("is_paused"))

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
    client = RunClient(await FrameStream.open(connection))
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
    except EOFError:  # the run has ended, and nobody waits for this process
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


def main(connection_fd: int, life_fd: int, listening_fd: int) -> None:
    """Serve until the run ends."""
    end_with_run(life_fd)
    connection = FrameConnection(connection_fd)
    setup: ServerSetup = pickle.loads(connection.receive())
    max_connections = _be_modest(setup.rollout.server.max_connections)
    asyncio.run(_serve(setup, connection.socket, socket.socket(fileno=listening_fd), max_connections))
