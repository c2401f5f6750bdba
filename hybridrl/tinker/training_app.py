"""The ASGI application of the training server: the paths of Tinker's API, and its token."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker import types

from hybridrl.notify import notify
from hybridrl.tinker.pending_requests import Failure, PendingRequest
from hybridrl.tinker.training_service import TrainingService
from hybridrl.tinker.wire import RequestError
from hybridrl.utils.http_server import HttpRefusal, Scope, TokenGuard

#: keys of the client begin with it
TOKEN_PREFIX = "tml-"
_API = "/api/v1"
_OPEN = ("/health", f"{_API}/healthz")
_WAIT_S = 20.0  # clients wait 45 s for an answer
_PROTOBUF = "application/x-protobuf"


class TrainingGuard(TokenGuard):
    """The guard of the training server, whose clients send the token as `X-API-Key`.

    Args:
        app: the application.
        token: that requests bring; None serves everybody.
        body_mb: longer bodies are refused.
    """

    def __init__(self, app: Any, token: str | None, body_mb: int) -> None:
        super().__init__(app, token, body_mb * 2**20, "--max-body-mb", _OPEN)

    def checked(self, scope: Scope, headers: Mapping[bytes, bytes]) -> tuple[Scope, bool]:
        """See `TokenGuard.checked`."""
        if self.is_owner(headers.get(b"x-api-key", b"")):
            return scope, True
        if scope["path"] in _OPEN:
            return scope, False
        raise HttpRefusal(HTTPStatus.UNAUTHORIZED, "wrong or missing token: set TINKER_API_KEY to this server's token")


class TrainingApp:
    """The paths of the API.

    Args:
        service: answers.
        samplers: requests that a client samples with at once.
    """

    def __init__(self, service: TrainingService, samplers: int) -> None:
        self._service, self._samplers = service, samplers

    def app(self, token: str | None, body_mb: int) -> TrainingGuard:
        """The application behind its guard."""
        service = self._service
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._json(types.CreateSessionRequest, self._open_session),
            "session_heartbeat": self._json(types.SessionHeartbeatRequest, self._heartbeat),
            "sessions/{id}/finish": self._finish,
            "telemetry": self._telemetry,
            "create_model": self._json(types.CreateModelRequest, service.create_run),
            "load_weights": self._json(types.LoadWeightsRequest, service.load_run),
            "get_info": self._json(types.GetInfoRequest, lambda request: service.info(request.model_id)),
            "forward_backward": self._forward_backward,
            "optim_step": self._json(types.OptimStepRequest, service.optim_step),
            "save_weights": self._json(types.SaveWeightsRequest, service.save),
            "save_weights_for_sampler": self._json(types.SaveWeightsForSamplerRequest, service.save_for_sampler),
            "weights_info": self._weights_info,
            "create_sampling_session": self._json(types.CreateSamplingSessionRequest, self._open_sampler),
            "join_sampling_session": self._json(types.JoinSamplingSessionRequest, self._join_sampler),
            "asample": self._json(types.SampleRequest, self._sample),
            "retrieve_future": self._retrieve,
        }
        gets = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "samplers/{id}": self._sampler,
            "sessions/{id}": self._session,
        }
        routes = [Route(f"{_API}/{path}", _answering(call), methods=["POST"]) for path, call in posts.items()]
        routes += [Route(f"{_API}/{path}", _answering(call), methods=["GET"]) for path, call in gets.items()]
        routes += [Route("/health", _answering(self._health), methods=["GET"])]
        return TrainingGuard(Starlette(routes=routes, exception_handlers={HTTPException: _not_served}), token, body_mb)

    def _json(self, model: type[BaseModel], answer: Callable[[Any], Any]) -> Callable[[Request], Awaitable[Response]]:
        """Read a body of this class, and answer with JSON, or with the future of a request that was accepted."""

        async def call(http: Request) -> Response:
            return _response(answer(model.model_validate_json(await http.body())))

        return call

    async def _client_config(self, http: Request) -> Response:
        limit = {"sample_max_concurrent_requests": self._samplers, "use_pyqwest_transport": False}
        return JSONResponse({"pjwt_auth_enabled": False, **limit})

    async def _dynamic_config(self, http: Request) -> Response:
        return JSONResponse({})

    async def _telemetry(self, http: Request) -> Response:
        await http.body()
        return JSONResponse({"status": "accepted"})

    async def _health(self, http: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _capabilities(self, http: Request) -> Response:
        facts = self._service.backend.facts
        model = {"model_name": facts.name, "max_context_length": facts.context, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [model]})

    def _open_session(self, request: Any) -> dict[str, Any]:
        return {"type": "create_session", "session_id": self._service.open_session(request).id}

    def _heartbeat(self, request: Any) -> dict[str, Any]:
        self._service.heartbeat(request.session_id)
        return {"type": "session_heartbeat"}

    async def _finish(self, http: Request) -> Response:
        self._service.finish_session(http.path_params["id"])
        return JSONResponse({})

    async def _session(self, http: Request) -> Response:
        session = self._service.session(http.path_params["id"])
        return JSONResponse(
            {
                "training_run_ids": list(session.runs),
                "sampler_ids": list(session.samplers),
                "user_metadata": session.user_metadata,
                "display_name": session.display_name,
            }
        )

    async def _forward_backward(self, http: Request) -> Response:
        return _response(self._service.forward_backward(await http.body()))

    async def _weights_info(self, http: Request) -> Response:
        body = await http.json()
        if not isinstance(body, dict) or not isinstance(body.get("tinker_path"), str):
            raise RequestError("the body is an object with tinker_path, a text")
        return JSONResponse(self._service.weights_info(body["tinker_path"]))

    def _open_sampler(self, request: Any) -> dict[str, Any]:
        sampler = self._service.open_sampler(request)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def _join_sampler(self, request: Any) -> dict[str, Any]:
        sampler = self._service.sampler(request.sampling_session_id)
        sampler.clients += 1
        return {"type": "join_sampling_session", "client_counter": sampler.clients - 1}

    async def _sampler(self, http: Request) -> Response:
        sampler = self._service.sampler(http.path_params["id"])
        name = self._service.backend.facts.name
        return JSONResponse({"sampler_id": sampler.id, "base_model": name, "model_path": sampler.path})

    def _sample(self, request: Any) -> dict[str, Any]:
        accepted = self._service.sample(request)
        ids = [f"{accepted.id}:{number}" for number in range(request.num_samples)]
        return {"request_id": accepted.id, "sample_sequence_ids": ids}

    async def _retrieve(self, http: Request) -> Response:
        id = types.FutureRetrieveRequest.model_validate_json(await http.body()).request_id
        outcome = await self._service.queue.answer(id, _WAIT_S)
        if outcome is None:
            again = {"type": "try_again", "request_id": id, "queue_state": "active"}
            return JSONResponse(again, HTTPStatus.REQUEST_TIMEOUT)
        if isinstance(outcome, Failure):
            return JSONResponse({"error": outcome.message, "category": outcome.category})
        if isinstance(outcome, bytes):
            return Response(outcome, media_type=_PROTOBUF)
        return JSONResponse(outcome)


def _response(answer: PendingRequest | Mapping[str, Any]) -> Response:
    return JSONResponse({"request_id": answer.id} if isinstance(answer, PendingRequest) else answer)


async def _not_served(http: Request, error: Exception) -> Response:
    """Report a path, or a method, that is not served."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": f"{http.method} {http.url.path} is not served"}, error.status_code)


def _answering(call: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Report what is wrong with a request as JSON."""

    @functools.wraps(call)
    async def answered(http: Request) -> Response:
        try:
            return await call(http)
        except HttpRefusal as error:
            headers = {
                HTTPStatus.TOO_MANY_REQUESTS: {"Retry-After": "1"},
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE: {"Connection": "close"},  # what was not read would be a request
            }
            return JSONResponse({"detail": str(error)}, error.status, headers.get(HTTPStatus(error.status)))
        except RequestError as error:
            return JSONResponse({"detail": str(error)}, HTTPStatus.BAD_REQUEST)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the body"
            return JSONResponse({"detail": f"{place}: {first['msg']}"}, HTTPStatus.UNPROCESSABLE_ENTITY)
        except ValueError as error:
            return JSONResponse({"detail": f"the body is no JSON: {error}"}, HTTPStatus.BAD_REQUEST)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            notify(f"{http.method} {http.url.path}: {type(error).__name__}: {error}", "error")
            return JSONResponse({"detail": f"{type(error).__name__}: {error}"}, HTTPStatus.INTERNAL_SERVER_ERROR)

    return answered
