"""A process that runs sessions: a Ray actor that takes tasks, asks the controller for generations, returns attempts."""

import asyncio
import contextlib
import functools
import os
import resource
import traceback
from collections.abc import Sequence
from typing import Any

from ray import cloudpickle

from hybridrl.agents.agents import Agents
from hybridrl.agents.session import SessionResult, Task, run_attempt
from hybridrl.agents.workers.setup import SessionWorkerSetup, agents_of
from hybridrl.processes.inherited import ignore_stop_signals, keep_exit_codes
from hybridrl.rollout.request import Completion, Request
from hybridrl.scored import Reason, Unscored
from hybridrl.utils import work_folder

#: (what, key of the session, value). To a worker: "run" with a pickled `Task`, "completion", "cancel". From a worker:
#: "request", "done" with a pickled `SessionResult`.
Message = tuple[str, int, Any]


class SessionFailedError(Exception):
    """The exception that ended a session in another process, as text."""


class SessionWorker:
    """The actor's class; `SessionPool` starts it."""

    def __init__(self) -> None:
        keep_exit_codes()
        ignore_stop_signals()
        with contextlib.suppress(PermissionError):  # already leads a session, and so a process group
            os.setpgid(0, 0)  # out of reach of the terminal's Ctrl-C, with everything that tools start
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):  # sessions have sockets
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._agents: Agents
        self._sessions: dict[int, asyncio.Task[None]] = {}
        self._completions: dict[str, asyncio.Future[Completion]] = {}
        self._messages: list[Message] = []
        self._has_messages = asyncio.Event()

    async def start(self, setup: SessionWorkerSetup, folder: str | None = None) -> int:
        """Make what the sessions share; returns the id of this process.

        Args:
            setup: what to make it from.
            folder: working folder of the run's program; see `hybridrl.utils.work_folder`.

        Raises:
            RolloutError: something cannot be made here.
        """
        work_folder.enter(folder)
        self._agents = agents_of(setup)
        return os.getpid()

    async def deliver(self, messages: Sequence[Message]) -> None:
        """Take messages of the controller."""
        for kind, key, value in messages:
            if kind == "run":
                running = self._sessions[key] = asyncio.create_task(self._run(key, value))
                running.add_done_callback(functools.partial(self._forget, key))
            elif kind == "completion":
                future = self._completions.pop(value.id, None)
                if future is not None and not future.done():
                    future.set_result(value.lists())
            elif (session := self._sessions.get(key)) is not None:
                session.cancel()

    async def collect(self, wait_s: float) -> list[Message]:
        """Return the messages to the controller since the last call; wait up to `wait_s` seconds for the first."""
        if not self._messages:
            self._has_messages.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_messages.wait(), wait_s)
        messages, self._messages = self._messages, []
        return messages

    def _send(self, kind: str, key: int, value: Any) -> None:
        self._messages.append((kind, key, value))
        self._has_messages.set()

    async def _run(self, key: int, data: bytes) -> None:
        try:
            task: Task = cloudpickle.loads(data)
        except Exception as error:  # a value of the row is of a class that is not there
            attempt = _failed_attempt(f"the row cannot be read by the process of the session: {error!r}")
        else:
            try:
                attempt = await run_attempt(self._agents, _Client(self, key), task)
            except Exception as error:  # the controller waits for an answer to every session
                attempt = _failed_attempt(f"the session failed: {type(error).__name__}")
        self._send("done", key, _pickled(attempt))

    def _forget(self, key: int, session: asyncio.Task[None]) -> None:
        self._sessions.pop(key, None)

    async def ask(self, key: int, request: Request) -> Completion:
        """The completion of a request of a session. Where generation fails, the controller cancels the session."""
        self._completions[request.id] = asyncio.get_running_loop().create_future()
        self._send("request", key, request)
        try:
            return await self._completions[request.id]
        finally:
            self._completions.pop(request.id, None)

    async def close(self) -> None:
        """End the sessions, and what they share."""
        sessions = list(self._sessions.values())
        for session in sessions:
            session.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)
        if hasattr(self, "_agents"):
            await asyncio.to_thread(self._agents.close)


class _Client:
    """The generation client of one session."""

    def __init__(self, worker: SessionWorker, key: int) -> None:
        self._worker, self._key = worker, key

    async def generate(self, request: Request) -> Completion:
        return await self._worker.ask(self._key, request)

    async def abort(self, ids: Sequence[str]) -> None:
        raise NotImplementedError("a session ends its own requests by ending")

    async def stats(self) -> dict[str, dict[str, float]]:
        return {}

    async def health(self) -> str | None:
        return None


def _failed_attempt(why: str) -> SessionResult:
    return SessionResult(unscored=Unscored(Reason.INFRA, why))


def _pickled(attempt: SessionResult) -> bytes:
    """An attempt as the controller reads it: the exception as text, because its class may not be there."""
    if attempt.failure is not None:
        attempt.failure = SessionFailedError("".join(traceback.format_exception(attempt.failure)))
    try:
        attempt.trajectories = [trajectory.with_arrays() for trajectory in attempt.trajectories]
        return cloudpickle.dumps(attempt)
    except Exception as error:
        return cloudpickle.dumps(
            _failed_attempt(f"what the session returned cannot be sent to the controller: {error!r}")
        )
