"""The run's side of its server process: starts and watches it, and answers its calls with the run's rollout."""

import asyncio
import contextlib
import functools
import pickle
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.errors import RolloutError
from hybridrl.models.info import tokenizer_of
from hybridrl.models.model_config import config_of
from hybridrl.models.vision import ImageTensors
from hybridrl.notify import notify
from hybridrl.processes.child import Child, ending
from hybridrl.processes.frame_stream import FrameStream
from hybridrl.processes.frames import MalformedMessage
from hybridrl.processes.peer import JSON, Peer
from hybridrl.rollout.client import GenerationClient
from hybridrl.rollout.request import Completion, Request
from hybridrl.serve import server_messages
from hybridrl.serve.gate import GuestGate, PauseMode
from hybridrl.serve.http import STOP_S, Listener
from hybridrl.utils.movement import Movement, StartWatch, family

_LOOK_S = 0.5
_STABLE_S = 60.0  # a process that lived for so long did not fail at its start
_MAX_FAILURES = 3
_PAUSE_S = 1.0
_LOG_LINES = 40


@dataclass(frozen=True)
class ServerSetup:
    """Settings of the server's process.

    Attributes:
        rollout, model: groups of the configuration.
        token: the bearer token of clients.
        heeds_seeds: the engine samples with a request's own seed.
        template_kwargs: further variables of the chat template (`data.apply_chat_template_kwargs`).
        image_kwargs: settings of the model's image processor (`data.mm_processor_kwargs`).
        records_routing: the engine returns the experts of tokens (`router_replay.mode=R3`).
    """

    rollout: RolloutConfig
    model: ModelConfig
    token: str
    heeds_seeds: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    image_kwargs: Mapping[str, Any] = field(default_factory=dict)
    records_routing: bool = False


class ServerProcess:
    """Serves a `GenerationClient` over HTTP from another process, which cannot take the run with it.

    If the process ends, its clients' requests are aborted and it is restarted at the same address.

    Args:
        client: generates.
        setup: what the process needs to know.
        listener: the run's socket; closed by `stop`.
        log_file: where the process writes; None: to this process's standard error.
    """

    def __init__(
        self, client: GenerationClient, setup: ServerSetup, listener: Listener, log_file: Path | None = None
    ) -> None:
        self.client = client
        self.listener = listener
        self._child: Child | None = None
        self._setup = setup
        self._log_file = log_file
        self._ready = threading.Event()
        self._over = threading.Event()
        self._stopping = False
        self._loop = asyncio.new_event_loop()
        self._gate = GuestGate(client, functools.cache(lambda: tokenizer_of(setup.model)))
        self._peer: Peer | None = None
        self._in_flight: set[str] = set()  # ids of requests in flight
        self._own: dict[str, Callable[[Request], Awaitable[Completion]]] = {}  # sessions of the run itself
        self.images: dict[int, ImageTensors] = {}  # by the number that the process calls them
        self._thread = threading.Thread(target=self._run, name="openai-server", daemon=True)

    @property
    def pid(self) -> int | None:
        """The id of the process; None before it was started."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the process, without waiting for it."""
        self._thread.start()

    def wait_ready(self) -> None:
        """Wait until clients are served, as long as something moves.

        Raises:
            RolloutError: the process does not start; the message holds the end of its log.
        """
        movement = Movement(lambda: [] if self.pid is None else family(self.pid), io=True)
        watch = StartWatch("the OpenAI server's process", movement, users=True)
        while not self._ready.wait(_LOOK_S):
            if self._over.is_set():
                raise RolloutError(f"the OpenAI server's process does not start{self._end_of_log()}")
            if (why := watch.why_given_up()) is not None:
                raise RolloutError(
                    f"the OpenAI server's process {self.pid} was not ready after {watch.waited_s:.0f} s: {why}"
                    f"{self._end_of_log()}"
                )

    def stop(self) -> None:
        """End the process; calls in progress get a few seconds."""
        self._stopping = True
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the thread ends by itself
                self._loop.call_soon_threadsafe(self._request_close)
            self._thread.join(2 * STOP_S + 5)
        self.listener.close()

    def take_session(self, id: str, generate: Callable[[Request], Awaitable[Completion]]) -> None:
        """Have the requests of a session answered by `generate`, which may be called in another thread."""
        self._own[id] = generate

    def leave_session(self, id: str) -> None:
        """Answer the session's requests as those of any client again."""
        self._own.pop(id, None)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._watch())
        except Exception as error:
            notify(f"the run is no longer served over HTTP: {type(error).__name__}: {error}", "error")
        finally:
            self._over.set()
            self._loop.close()

    async def _watch(self) -> None:
        failures = 0
        while not self._stopping:
            started = time.monotonic()
            how = await self._one_process()
            if self._stopping or not self._ready.is_set():
                return
            failures = 1 if time.monotonic() - started > _STABLE_S else failures + 1
            if failures > _MAX_FAILURES:
                notify(
                    f"the OpenAI server's process {how}, {failures} times in a row: nothing answers any longer at "
                    f"{self.listener.address}. Training continues{self._end_of_log()}",
                    "error",
                )
                return
            notify(
                f"the OpenAI server's process {how}; it restarts at {self.listener.address}. Its clients' requests are "
                f"aborted, training continues{self._end_of_log()}",
                "warning",
            )
            await asyncio.sleep(_PAUSE_S)

    async def _one_process(self) -> str:
        """Start a process and answer its calls until it ends; returns how it ended."""
        with contextlib.nullcontext() if self._log_file is None else open(self._log_file, "ab") as log:
            child = self._child = Child("hybridrl.serve.server_child", [self.listener.socket.fileno()], output=log)
        self.images = {}  # the numbers are those of another process
        stream = await FrameStream.open(child.connection)
        stream.send(pickle.dumps(self._setup))
        peer = self._peer = Peer(stream, JSON, self._methods, RolloutError)
        if self._stopping:
            self._request_close()
        try:
            await peer.serve()
        except EOFError:
            pass
        except MalformedMessage as error:
            notify(f"the OpenAI server's process sent something else than a message: {error}", "warning")
        finally:
            self._peer = None
            peer.close()
            code = await asyncio.to_thread(child.wait, STOP_S)
            code = await asyncio.to_thread(child.end) if code is None else code
            child.leave()
            await self._abort_in_flight(peer)
        return ending(code)

    @property
    def _methods(self) -> dict[str, Callable[..., Any]]:
        """The methods that the process may call."""
        return {
            "ready": self._ready.set,
            "image": self._take_image,
            "forget": lambda number: self.images.pop(int(number), None),
            "generate": self._generate,
            "abort": self._abort,
            "stats": self.client.stats,
            "health": self.client.health,
            "pause": self._pause,
            "resume": self._gate.resume,
            "is_paused": self._gate.is_paused,
        }

    def _take_image(self, number: Any, image: Any) -> None:
        self.images[int(number)] = server_messages.image_from_plain(image, config_of(self._setup.model))

    async def _generate(self, plain: Any) -> dict[str, Any]:
        images = None
        if plain.get("images") is not None:
            config, ids = config_of(self._setup.model), plain["prompt_ids"]
            images = server_messages.images_from_plain(plain["images"], ids, self.images, config)
        request = server_messages.request_from_plain(plain, images)
        self._in_flight.add(request.id)
        try:
            completion = await self._own.get(request.session, self._gate.generate)(request)
            return server_messages.completion_to_plain(completion, request.routing)
        finally:
            self._in_flight.discard(request.id)

    async def _abort(self, ids: Any) -> None:
        await self._gate.abort(sorted(self._in_flight.intersection(ids)))  # those of clients, never those of training

    async def _pause(self, mode: Any) -> None:
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode={mode!r}")
        await self._gate.pause(mode)

    async def _abort_in_flight(self, peer: Peer) -> None:
        """End the requests of a process that has ended; nobody waits for them."""
        if self._in_flight:
            await self._gate.abort(sorted(self._in_flight))
        await peer.finish(STOP_S)

    def _request_close(self) -> None:
        if self._peer is not None and self._ready.is_set():
            self._peer.tell("close")
        elif self._child is not None:
            self._child.process.kill()

    def _end_of_log(self) -> str:
        if self._log_file is None or not self._log_file.is_file():
            return ""
        lines = self._log_file.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return f"\nThe end of {self._log_file}:\n  " + "\n  ".join(lines) if lines else ""
