"""The user's own agents behind the run's server: their processes and their sessions."""

import asyncio
import contextlib
import json
import pickle
import shlex
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hybridrl.chat.turns import Turns
from hybridrl.config import RolloutConfig
from hybridrl.config.checks.check_agents import check_connections
from hybridrl.config.schema.multi_turn import AgentConfig
from hybridrl.errors import RolloutError
from hybridrl.processes.frames import MalformedMessage
from hybridrl.processes.template import Template
from hybridrl.processes.untrusted_results import LARGEST_RESULT, decode_result
from hybridrl.rollout.request import Completion, Request
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.serve import RunServer
from hybridrl.utils.agent_host import KEY, AgentJob, AgentProgram, Result, agent_result
from hybridrl.utils.files import check_writable
from hybridrl.utils.movement import watch_of

_CALL_S = 60.0
_PAUSE_S = 1.0
_SETTINGS = ("function", "command", "timeout_s", "sampling", "match", "trace_dir")
_THREADS = 16  # that open and close sessions
_HOST = "hybridrl.utils.agent_host"
_VARIABLES = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class AgentFailed(Exception):
    """An agent raised, or its process ended.

    Args:
        message: its own words.
        by_itself: it raised, or its command ended with an exit code; nothing ended it from outside.
    """

    def __init__(self, message: str, by_itself: bool = False) -> None:
        super().__init__(message)
        self.by_itself = by_itself


class _UnknownSession(RolloutError):
    """The server answers that there is no such session: it has restarted meanwhile."""


@dataclass(frozen=True)
class Closed:
    """A session that is over.

    Attributes:
        too_long: requests that did not fit the session's length.
        cut: the last request was one of them.
        messages: the conversation of its last call; None: the server has restarted meanwhile, and knows of none.
        trace: its calls as OpenEnv's `TrainingTrace`, where `agent.trace_dir` asks for it and the server has it.
    """

    too_long: int = 0
    cut: bool = False
    messages: Sequence[Mapping[str, Any]] | None = None
    trace: Mapping[str, Any] | None = None


class AgentRunner(Protocol):
    """Runs the agents of a loop, somewhere."""

    async def run(self, job: AgentJob) -> Result:
        """Run an agent, until it ends or this call is cancelled.

        Raises:
            AgentFailed: it failed.
        """

    def close(self) -> None:
        """End the agents that still run."""


class Gateway:
    """Runs agents against the run's server. One serves all sessions of a loop.

    Args:
        config: `actor_rollout_ref.rollout`; its group `agent` has limits and how requests are sampled.
        runner: runs the agents.
    """

    def __init__(self, config: RolloutConfig, runner: AgentRunner) -> None:
        self._config = config
        self._runner = runner
        self._server: RunServer | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sessions")
        if config.agent.trace_dir is not None:
            _check_folder(Path(config.agent.trace_dir))

    def connect(self, server: RunServer | None) -> None:
        """Agents call this server from here on.

        Raises:
            RolloutError: there is none.
        """
        if server is None:
            raise RolloutError(
                "agents need the run's server, and actor_rollout_ref.rollout.server.enable=False; set it to true"
            )
        self._server = server

    async def run(
        self, generate: Callable[[Request], Awaitable[Completion]], sampling: SamplingParams, row: Mapping[str, Any]
    ) -> tuple[Result | AgentFailed, Closed]:
        """Run the agent of a row in a session of its own; what it returned or raised, and how the session ended.

        Args:
            generate: answers the session's requests.
            sampling: of the step.

        Raises:
            RolloutError: the session cannot be opened, or the server does not say how it ended.
            TimeoutError: the agent took longer than `agent.timeout_s`.
        """
        assert self._server is not None, "connect comes first"
        id = (await self._call("POST", "/sessions", self._opening(sampling)))["id"]
        self._server.process.take_session(id, generate)
        try:
            try:
                result = await self._run_agent(id, row)
            finally:
                self._server.process.leave_session(id)
        except BaseException:
            with contextlib.suppress(RolloutError):  # why it ended is known already
                await self._closed(id)
            raise
        return result, await self._closed(id)

    async def _run_agent(self, id: str, row: Mapping[str, Any]) -> Result | AgentFailed:
        assert self._server is not None
        limit = self._config.agent.timeout_s
        root, access = self._server.access.url.removesuffix("/v1"), self._server.access
        job = AgentJob(f"{root}/sessions/{id}/v1", id, access.model, row)
        try:
            async with asyncio.timeout(limit):
                return await self._runner.run(job)
        except TimeoutError:
            raise TimeoutError(f"the agent took longer than {KEY}.timeout_s={limit:g}") from None
        except AgentFailed as error:
            return error

    def _opening(self, sampling: SamplingParams) -> dict[str, Any]:
        """The body that opens a session."""
        agent = self._config.agent
        return {
            "sampling_params": {
                "temperature": sampling.temperature if sampling.do_sample else 0.0,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "ignore_eos": sampling.ignore_eos,
                "stop": list(sampling.stop),
            },
            "fixed_sampling": agent.sampling == "run",
            "max_response_tokens": self._config.response_length,
            "match": agent.match,
        }

    async def _closed(self, id: str) -> Closed:
        """Close a session; asked again once where the server does not answer.

        Raises:
            RolloutError: it does not answer again.
        """
        trace = None
        if self._config.agent.trace_dir is not None:
            with contextlib.suppress(RolloutError):  # the session's own record has its tokens
                trace = await self._call("GET", f"/sessions/{id}/trace")
        try:
            try:
                description = await self._call("DELETE", f"/sessions/{id}")
            except _UnknownSession:
                raise
            except RolloutError:
                await asyncio.sleep(_PAUSE_S)
                description = await self._call("DELETE", f"/sessions/{id}")
        except _UnknownSession:
            return Closed()
        return Closed(int(description["too_long"]), bool(description["cut"]), description["messages"], trace)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, method, path, body)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        assert self._server is not None
        access = self._server.access
        url = access.url.removesuffix("/v1") + path
        headers = {"Authorization": f"Bearer {access.token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is a machine of this run
        try:
            request = urllib.request.Request(url, data, headers, method=method)
            with opener.open(request, timeout=_CALL_S) as answer:
                content: dict[str, Any] = json.loads(answer.read())
                return content
        except urllib.error.HTTPError as error:
            kind = _UnknownSession if error.code == 404 else RolloutError
            raise kind(f"{method} {path.partition('-')[0]}: {_reason(error)}") from error
        except (OSError, ValueError) as error:
            raise RolloutError(f"the run's server does not answer at {access.url}: {error}") from error

    def close(self) -> None:
        """End the agents that still run."""
        self._runner.close()
        self._threads.shutdown(wait=False)


def _check_folder(folder: Path) -> None:
    try:
        check_writable(folder)
    except OSError as error:
        raise RolloutError(f"{KEY}.trace_dir={folder}: traces cannot be written there ({error})") from error


def _reason(error: urllib.error.HTTPError) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(error.read())["error"]["message"])
    return str(error)


class AgentLoop(Protocol):
    """The attributes of a class of agent loops that describe its agents; see `AgentLoopBase`."""

    uses_gateway: ClassVar[bool]
    agent_settings: ClassVar[Sequence[str]]

    @classmethod
    def start_agents(cls, rollout: RolloutConfig, arguments: Mapping[str, Any]) -> AgentRunner: ...


def gateways_of(
    rollout: RolloutConfig, loops: Mapping[str, tuple[type[AgentLoop], Mapping[str, Any]]], turns: Turns
) -> dict[str, Gateway]:
    """Create the gateways that run agents behind the run's server, by the name of the loop.

    Args:
        loops: those of the run, with the arguments of their entries.
        turns: continues the conversations.

    Raises:
        RolloutError: an agent cannot be started, a setting would not be read, or the chat template cannot be continued.
    """
    used = {name: loop for name, loop in loops.items() if loop[0].uses_gateway}
    plain = AgentConfig()
    read = {setting for cls, _ in used.values() for setting in cls.agent_settings}
    for name in _SETTINGS:
        if name not in read and getattr(rollout.agent, name) != getattr(plain, name):
            raise RolloutError(
                f"{KEY}.{name}={getattr(rollout.agent, name)} without a loop that reads it; remove it, set "
                f"{KEY}.default_agent_loop=gateway_agent, or name gateway_agent in the column agent_name"
            )
    if not used:
        return {}
    if not rollout.server.enable:
        raise RolloutError(
            f"the loop {next(iter(used))} runs agents against the run's server, and actor_rollout_ref.rollout.server."
            "enable=False; set it to true"
        )
    for fault in check_connections(rollout):
        raise RolloutError(fault)
    turns.check(None)
    gateways: dict[str, Gateway] = {}
    try:
        for name, (cls, arguments) in used.items():
            gateways[name] = Gateway(rollout, cls.start_agents(rollout, arguments))
    except BaseException:
        for gateway in gateways.values():
            gateway.close()
        raise
    return gateways


def program_of(config: RolloutConfig) -> AgentProgram:
    """The agent that the settings name.

    Raises:
        RolloutError: they name none, or both kinds.
    """
    agent = config.agent
    if (agent.function is None) == (agent.command is None):
        count = "neither" if agent.function is None else "both"
        raise RolloutError(
            f"the loop gateway_agent runs {KEY}.function (module:function or FILE.py:function) or {KEY}.command, and "
            f"{count} of them is set; set one"
        )
    words = tuple(shlex.split(agent.command)) if agent.command is not None else ()
    if agent.command is not None and not words:
        raise RolloutError(f"{KEY}.command={agent.command!r} has no word")
    return AgentProgram(agent.function, words)


class AgentHost:
    """Runs agents in processes that are forked from one with the user's code; see `hybridrl.utils.agent_host`.

    Args:
        program: what it runs.

    Raises:
        RolloutError: it cannot be loaded.
    """

    def __init__(self, program: AgentProgram) -> None:
        def watch(pid: int) -> Callable[[], str | None]:
            return watch_of("the process of agents", pid).why_given_up

        self._template = Template(_HOST, pickle.dumps(program), "agents", _VARIABLES, RolloutError, watch)

    @property
    def pid(self) -> int:
        """The id of the process that starts agents."""
        return self._template.pid

    async def run(self, job: AgentJob) -> Result:
        """Run an agent in a process of its own; ended with this call, whatever becomes of it.

        Raises:
            AgentFailed: it raised, or its process ended.
            RolloutError: the process that starts agents dies again and again.
        """
        async with self._template.job() as stream:
            stream.send(pickle.dumps(job))
            try:
                message = decode_result(await stream.receive(LARGEST_RESULT))
            except EOFError:
                raise AgentFailed("the agent's process ended without an answer") from None
            except MalformedMessage as error:
                raise AgentFailed(f"the agent's process sent something else than its result: {error}") from None
        self._template.note_answer()
        if message.kind not in ("score", "missing"):
            raise AgentFailed(message.text, by_itself=message.kind == "raised")
        return agent_result(message)

    def close(self) -> None:
        self._template.close()
