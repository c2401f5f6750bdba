"""Environments of verifiers, in a process with packages of its own; the run never imports verifiers."""

import asyncio
import json
import os
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.agents.environments.environment_server import EnvironmentServer
from hybridrl.agents.environments.install import python_of
from hybridrl.agents.gateway import AgentFailed
from hybridrl.errors import RolloutError
from hybridrl.scored import Scored, Unscored
from hybridrl.serve.schema import TOO_LONG
from hybridrl.utils import clock
from hybridrl.utils.agent_host import AgentJob, Result

#: the column with a task of verifiers as JSON; `hybridrl.data.preprocess.verifiers` writes it
TASK = "verifiers_task"
_BRIDGES = Path(__file__).with_name("bridges")
_FORM = "{name: NAME, _target_: verifiers_agent, env: {taskset: {id: ID}}}"


class VerifiersServer:
    """An environment of verifiers 0.4, served on this machine by verifiers' own server.

    Args:
        env: verifiers' block `[env]`: `{taskset: {id: ...}, agent: {harness: {id: ...}, runtime: {type: ...}}}`.
        address: of a server that runs already (`tcp://HOST:PORT`); None: one is started.
        folder: from which the taskset can be imported.
        packages: further packages of the environment, as pip takes them.
        python: the Python of an environment that is there already; None: one is made on first use.
        workers: processes that verifiers may start.
        start_timeout_s: seconds until it must answer; None: it has time as long as something moves.
        serves: False: it is read for its tasks only.

    Raises:
        RolloutError: the arguments cannot work.
    """

    def __init__(
        self,
        env: Mapping[str, Any] | None = None,
        address: str | None = None,
        folder: str = ".",
        packages: Sequence[str] = (),
        python: str | None = None,
        workers: int = 1,
        start_timeout_s: float | None = None,
        serves: bool = True,
    ) -> None:
        if env is None and address is None:
            raise RolloutError(f"the loop verifiers_agent needs env or address: {_FORM}")
        if env is not None and not isinstance(env, Mapping):
            raise RolloutError(f"env is {env!r}, and must be verifiers' block: {_FORM}")
        self._server: EnvironmentServer | None = None
        self._settings = {"env": env, "address": address, "workers": int(workers), "serve": serves}
        self._folder, self._packages, self._python = Path(folder).expanduser(), packages, python
        self._start_timeout_s = None if start_timeout_s is None else float(start_timeout_s)

    @classmethod
    def of(cls, arguments: Mapping[str, Any], serves: bool = True) -> "VerifiersServer":
        """The server of an entry in `agent.agent_loop_config_path`.

        Raises:
            RolloutError: an argument is unknown, or they cannot work.
        """
        try:
            return cls(**arguments, serves=serves)
        except (TypeError, ValueError) as error:
            raise RolloutError(f"verifiers_agent: {error}; its entry has the form {_FORM}") from error

    def start(self) -> None:
        """Start it, and its environment where there is none.

        Raises:
            RolloutError: it does not start; its own output says why.
        """
        try:
            import httpx  # noqa: F401  (a mistake is found before the run begins)
        except ImportError as error:
            raise RolloutError("it needs the package httpx: bash scripts/install.sh auto openai") from error

        python = Path(self._python) if self._python else python_of("verifiers", self._packages)
        variables = {
            "HYBRIDRL_VERIFIERS": json.dumps(self._settings),
            "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",  # harnesses run uv
            "PYTHONPATH": str(_BRIDGES),
        }
        self._server = EnvironmentServer(python, "verifiers_bridge:app", self._folder, self._start_timeout_s, variables)
        self._server.port()

    def tasks(self, limit: int | None) -> list[dict[str, Any]]:
        """The first tasks, as verifiers dumps them; all with None.

        Raises:
            RolloutError: it does not give them.
        """
        assert self._server is not None, "start comes first"
        query = "" if limit is None else f"?limit={limit}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            address = f"http://127.0.0.1:{self._server.port()}/tasks{query}"
            with opener.open(urllib.request.Request(address, headers=self._server.headers)) as answer:
                tasks: list[dict[str, Any]] = json.loads(answer.read())
                return tasks
        except (OSError, ValueError) as error:
            raise RolloutError(f"the environment gave no tasks: {error}") from error

    async def run(self, job: AgentJob) -> Result:
        """One rollout, given up when this call is cancelled.

        Raises:
            AgentFailed: the rollout or its server failed.
        """
        import httpx

        assert self._server is not None, "start comes first"
        task = job.row.get(TASK)
        if task is None:
            raise AgentFailed(
                f"a row has no column {TASK}; python -m hybridrl.data.preprocess.verifiers writes rows that have it"
            )
        with clock.stopped():  # it may have to start again
            port = await asyncio.to_thread(self._server.port)
        body = {"task": json.loads(task), "base_url": job.base_url, "model": job.model}
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
                address, headers = f"http://127.0.0.1:{port}/run", self._server.headers
                answer = (await client.post(address, json=body, headers=headers)).raise_for_status().json()
        except httpx.HTTPError as error:
            raise AgentFailed(f"the server of the environment failed: {type(error).__name__}: {error}") from error
        if "failed" not in answer:
            return Scored(float(answer["score"]), answer["extra"])
        if answer["failed"] == "infra":
            raise AgentFailed(answer["detail"], by_itself=TOO_LONG in answer["detail"])
        return Unscored(answer["failed"], answer["detail"])

    def close(self) -> None:
        """End it."""
        if self._server is not None:
            self._server.stop()
