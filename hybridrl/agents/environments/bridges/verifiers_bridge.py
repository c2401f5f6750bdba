"""An ASGI application between a run and an environment server of verifiers 0.4.

It runs with the Python of the server's own environment, so it imports nothing of hybridrl. verifiers' own client speaks
to verifiers' own server; the run sends plain JSON over HTTP. The variable `HYBRIDRL_VERIFIERS` has the settings as
JSON: `env` (verifiers' `[env]` block), `address` of a running server or null, `workers`, and `serve`.

    GET  /tasks?limit=N   the tasks of the environment, as verifiers dumps them
    POST /run             {"task", "base_url", "model"}: one rollout; answers {"score", "extra"} or {"failed", "detail"}
"""

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

_NO_KEY = "HYBRIDRL_NO_KEY"  # a session is known by its address
_FAULTS_OF_TASKS = ("TaskError",)
_START_S = 86400.0  # the run watches whether something moves, and ends this process otherwise


class Bridge:
    """The environment and its server, which all requests share.

    Args:
        settings: see the module.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._env: Any = None
        self._client: Any = None
        self._server: Any = None
        self._life: Any = None

    async def start(self) -> None:
        """Load the environment, and start its server where none runs."""
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.serve import EnvClient, env_config_data
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        address = self._settings.get("address")
        if self._settings.get("env") is not None:
            config = resolve_env_config(dict(self._settings["env"]))
            trained = [name for name, agent in agent_config_fields(config).items() if agent.client is None]
            if len(trained) != 1:
                raise ValueError(
                    f"the policy plays {', '.join(trained) or 'no agent'} of {config.env_id}, and must play one; give "
                    "every other agent a client of its own"
                )
            self._env = load_environment(config)
            if address is None and self._settings["serve"]:
                address = await asyncio.to_thread(self._serve, env_config_data(config))
        if address is not None:
            self._client = EnvClient(address)
            await self._client.wait_for_server_startup(_START_S)

    def _serve(self, config: dict[str, Any]) -> str:
        from verifiers.v1.serve import serve_env

        spawn = multiprocessing.get_context("spawn")
        addresses, (theirs, self._life) = spawn.Queue(), spawn.Pipe(duplex=False)
        workers = int(self._settings["workers"])
        kwargs = {"max_workers": workers, "address": "tcp://127.0.0.1:0", "config_data": config}
        self._server = spawn.Process(
            target=serve_env, kwargs={**kwargs, "address_queue": addresses, "death_pipe": theirs}
        )
        self._server.start()
        theirs.close()
        while True:
            with contextlib.suppress(Exception):  # queue.Empty
                return str(addresses.get(timeout=0.2))
            if not self._server.is_alive():
                raise RuntimeError(f"verifiers' server ended with status {self._server.exitcode}")

    async def stop(self) -> None:
        """End the server."""
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            self._server.terminate()
            self._life.close()

    async def health(self, _: Request) -> PlainTextResponse:
        """The environment was loaded, and its server answers."""
        return PlainTextResponse("ok")

    async def tasks(self, request: Request) -> JSONResponse:
        """The first tasks."""
        limit = request.query_params.get("limit")
        stop = None if limit is None else int(limit)
        tasks = itertools.islice(iter(self._env.taskset), stop)
        return JSONResponse([task.data.model_dump(mode="json") for task in tasks])

    async def run(self, request: Request) -> JSONResponse:
        """One rollout, which is given up when the run hangs up."""
        from verifiers.v1.configs.client import EvalClientConfig
        from verifiers.v1.types import SamplingConfig

        body = await request.json()
        if self._server is not None and not self._server.is_alive():
            os._exit(1)  # the run starts it again
        rollout = asyncio.ensure_future(
            self._client.run(
                EvalClientConfig(base_url=body["base_url"], api_key_var=_NO_KEY),
                body["model"],
                SamplingConfig(),
                body["task"],
            )
        )
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait([rollout, gone], return_when=asyncio.FIRST_COMPLETED)
            if not rollout.done():
                return JSONResponse({"failed": "infra", "detail": "given up"})
            try:
                return JSONResponse(outcome(rollout.result()))
            except RuntimeError as error:
                return JSONResponse({"failed": "infra", "detail": str(error)})
        finally:
            for future in (rollout, gone):
                future.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def outcome(episode: Any) -> dict[str, Any]:
    """The score of an episode, or why there is none.

    Returns:
        `{"score", "extra"}`, or `{"failed", "detail"}` with a `hybridrl.scored.Reason`.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    late = episode.is_timeout or any(trace.is_timeout for trace in episode.traces)
    if late or not episode.ok or not all(trace.ok for trace in episode.traces):
        last = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode did not complete"
        graded = bool(errors) and errors[-1].type in _FAULTS_OF_TASKS
        return {"failed": "timeout" if late else "grading" if graded else "infra", "detail": last}
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        detail = f"the episode has {len(trained)} traces of the policy, and a session has one score"
        return {"failed": "grading", "detail": detail}
    (trace,) = trained
    if any(reward is None for reward in trace.rewards.values()):
        unknown = [name for name, reward in trace.rewards.items() if reward is None]
        return {"failed": "grading", "detail": f"no score of {', '.join(unknown)}"}
    extra: dict[str, Any] = {f"metric_{name}": value for name, value in trace.metrics.items()}
    extra |= {f"reward_{name}": reward.score for name, reward in trace.rewards.items()}
    return {"score": trace.reward, "extra": {**extra, "stop_condition": trace.stop_condition}}


def create_app(settings: Mapping[str, Any]) -> Starlette:
    """The application."""
    bridge = Bridge(settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await bridge.start()
        try:
            yield
        finally:
            await bridge.stop()

    routes = [
        Route("/health", bridge.health),
        Route("/tasks", bridge.tasks),
        Route("/run", bridge.run, methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def __getattr__(name: str) -> Any:
    if name == "app":  # made when the server asks for it, and not in processes that verifiers spawns
        return create_app(json.loads(os.environ["HYBRIDRL_VERIFIERS"]))
    raise AttributeError(name)
