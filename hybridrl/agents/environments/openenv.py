"""Environments of OpenEnv, out of process: the wire format of its servers over a WebSocket (tried with openenv 0.10.0).

The client sends `{"type": "reset" | "step" | "state", "data": {...}}`, and the server answers `{"type": "observation",
"data": {"observation", "reward", "done"}}`, `{"type": "state", "data"}` or `{"type": "error", "data": {"message",
"code"}}`. A connection is an episode. Nothing of OpenEnv is imported.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hybridrl.agents.entries import checked_config
from hybridrl.agents.environments.environment import Action, Environment, Step, register_environment
from hybridrl.agents.environments.environment_server import EnvironmentServer
from hybridrl.agents.environments.install import python_of
from hybridrl.errors import RolloutError
from hybridrl.utils import clock

_POLL_S = 0.05
_WHERE = "one of url (of a running server) and app (MODULE:NAME, which is started)"


class OpenEnvError(Exception):
    """The server answered with an error."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.code = str(data.get("code", ""))
        super().__init__(f"{self.code}: {data.get('message')}{self._details(data)}")

    @staticmethod
    def _details(data: Mapping[str, Any]) -> str:
        places = [
            f"{'.'.join(map(str, fault.get('loc', ())))}: {fault.get('msg')}" for fault in data.get("errors") or ()
        ]
        return f" ({'; '.join(places)})" if places else ""


@register_environment("openenv")
class OpenEnvEnvironment(Environment):
    """An episode on a server of OpenEnv.

    The row's `env_kwargs`, and `seed`, are the arguments of `reset`. An action that the server refuses as invalid is
    told to the model, which may try again; any other error ends the session without a score.

    Args:
        url: of a running server, `http://HOST:PORT` or `ws://HOST:PORT`.
        app: `MODULE:NAME` of a server that is started on this machine, in an environment of its own.
        folder: the folder of `app`.
        packages: further packages of that environment.
        python: the Python of an environment that is there already; None: one is made on first use.
        action_field: the field of an action that gets the text of a turn; None: the text is the action as JSON.
        observation_field: the field of an observation that the model sees; None: all of it as JSON.
        max_sessions: episodes at once of each process that runs sessions; further sessions wait, which is no time of a
            call. Give what the server allows, divided by `agent.num_workers` where `url` names one for all.
            None: any number, and `reset` waits for a server that is full.
        start_timeout_s: seconds until a server that is started must answer; None: it has time as long as something
            moves.
    """

    config_names = (
        *("url", "app", "folder", "packages", "python", "action_field", "observation_field", "max_sessions"),
        "start_timeout_s",
    )
    servers: ClassVar[dict[str, EnvironmentServer]] = {}
    _slots: ClassVar[dict[str, threading.Semaphore]] = {}

    def __init__(
        self,
        key: str,
        url: str | None = None,
        action_field: str | None = None,
        observation_field: str | None = None,
        **config: Any,
    ) -> None:
        super().__init__(**config)
        self._key, self._url = key, url
        self._action_field, self._observation_field = action_field, observation_field
        self._socket: Any = None
        self._has_slot = False

    @classmethod
    def start(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Start the server, or check that the URL has one."""
        checked_config(config, cls.config_names, "openenv")
        if (config.get("url") is None) == (config.get("app") is None):
            raise RolloutError(f"config needs {_WHERE}")
        try:
            import websockets  # noqa: F401  (a mistake is found before the run begins)
        except ImportError as error:
            raise RolloutError("it needs the package websockets: bash scripts/install.sh auto openenv") from error
        key = json.dumps(config, sort_keys=True, default=str)
        if config.get("app") is not None:
            packages: Sequence[str] = config.get("packages") or ()
            python = Path(config["python"]) if config.get("python") else python_of("openenv", packages)
            folder = Path(config.get("folder") or ".").expanduser()
            limit = config.get("start_timeout_s")
            server = EnvironmentServer(python, str(config["app"]), folder, None if limit is None else float(limit))
            server.port()
            cls.servers[key] = server
        if config.get("max_sessions") is not None:
            cls._slots[key] = threading.Semaphore(int(config["max_sessions"]))
        return {**config, "key": key}

    @classmethod
    def stop(cls, config: dict[str, Any]) -> None:
        """End the server, if it was started here."""
        cls._slots.pop(config["key"], None)
        if (server := cls.servers.pop(config["key"], None)) is not None:
            server.stop()

    async def reset(self, row: Mapping[str, Any]) -> Step:
        """Connect, and begin an episode."""
        await self._take_slot()
        kwargs = {k: v for k, v in (row.get("env_kwargs") or {}).items() if k != "name" and v is not None}
        while True:
            await self._connect()
            try:
                return self._step(await self._ask("reset", {"seed": row["seed"], **kwargs}), first=True)
            except OpenEnvError as error:
                if error.code != "CAPACITY_REACHED":  # also where the server has not ended an earlier session yet
                    raise
            await self._socket.close()
            await asyncio.sleep(_POLL_S)

    async def _connect(self) -> None:
        from websockets.asyncio.client import connect

        if self._url is None:
            server = self.servers[self._key]
            with clock.stopped():  # it may have to start again
                port = await asyncio.to_thread(server.port)
            url = f"ws://127.0.0.1:{port}/ws"
            self._socket = await connect(url, proxy=None, max_size=None, additional_headers=server.headers)
        else:
            base = self._url.rstrip("/").replace("https://", "wss://").replace("http://", "ws://")
            self._socket = await connect(f"{base}/ws", max_size=None)

    async def step(self, action: Action) -> Step:
        """Send the turn as an action."""
        if self._action_field is not None:
            data: Any = {self._action_field: str(action)}
        else:
            try:
                data = json.loads(action)
            except ValueError as error:
                return Step(f"Error: the action is no JSON: {error}")
            if not isinstance(data, dict):
                return Step("Error: the action is no JSON object")
        try:
            step = self._step(await self._ask("step", data))
        except OpenEnvError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return Step(f"Error: {error}")
        if step.done:
            step.extra = {**step.extra, "state": await self._ask("state", None)}
        return step

    async def close(self) -> None:
        """End the episode."""
        try:
            if self._socket is not None:
                await self._socket.close()
        finally:
            if self._has_slot and (slots := self._slots.get(self._key)) is not None:
                slots.release()
            self._has_slot = False

    async def _take_slot(self) -> None:
        slots = self._slots.get(self._key)
        if slots is None:
            return
        with clock.stopped():
            while not slots.acquire(blocking=False):
                await asyncio.sleep(_POLL_S)
        self._has_slot = True

    async def _ask(self, kind: str, data: Mapping[str, Any] | None) -> dict[str, Any]:
        """The data of the server's answer.

        Raises:
            OpenEnvError: it is an error.
        """
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):  # the reason may be there to be read, else `recv` raises
            await self._socket.send(json.dumps({"type": kind} | ({} if data is None else {"data": data})))
        answer = json.loads(await self._socket.recv())
        content: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") == "error":
            raise OpenEnvError(content)
        return content

    def _step(self, data: Mapping[str, Any], first: bool = False) -> Step:
        observation = dict(data.get("observation") or {})
        extra = {"metadata": observation.pop("metadata", None) or {}}
        reward, done = data.get("reward"), bool(data.get("done"))
        if first:
            return Step(self._text(observation), extra=extra)
        return Step(self._text(observation), None if reward is None else float(reward), done, extra)

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._observation_field is None:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation_field not in observation:
            raise RolloutError(
                f"config.observation_field={self._observation_field}: the observation has "
                f"{', '.join(observation) or 'no fields'}"
            )
        value = observation[self._observation_field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
