"""The ASGI application over one `GenerationClient`: OpenAI's and Anthropic's endpoints, sessions, health, metrics."""

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from hybridrl.rollout.client import GenerationClient
from hybridrl.serve.dialects.anthropic_messages import CountRequest, MessagesDialect, MessagesRequest, inner_request
from hybridrl.serve.dialects.chat_completions import ChatDialect
from hybridrl.serve.dialects.openai_responses import ResponsesDialect, ResponsesRequest
from hybridrl.serve.gate import Gate, GuestGate, PauseMode
from hybridrl.serve.limits import BODY_MB, BODY_MB_WITH_IMAGES, Guard, body_of_error
from hybridrl.serve.openai_api import Api, Served
from hybridrl.serve.pending import ClientGone
from hybridrl.serve.prometheus import CONTENT_TYPE, metrics_text
from hybridrl.serve.schema import (
    AbortRequest,
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    OpenSession,
)
from hybridrl.serve.session_table import ServerSession, SessionTable

_MAX_SESSIONS = 16384
_IDLE_S = 21600.0

__all__ = ["Served", "create_app"]


def create_app(
    client: GenerationClient,
    served: Served,
    token: str | None,
    max_requests: int = 4096,
    max_sessions: int = _MAX_SESSIONS,
    session_idle_s: float = _IDLE_S,
    gate: Gate | None = None,
    max_body_mb: int | None = None,
) -> FastAPI:
    """The application over a client, such as that of a run.

    Args:
        client: generates; requests of a client that disconnects are aborted.
        served: the model behind it.
        token: the key that every path but `/health` and `/metrics` requires; None serves everybody. The id of a session
            is also a key, for that session.
        max_requests: samples that are generated or wait at the same time.
        max_sessions: sessions that are open at the same time.
        session_idle_s: seconds without a request after which a session may be closed for another.
        gate: generates in place of `client`, and holds requests; None: the application has one of its own.
        max_body_mb: MiB of a request's body; None: by whether the model reads images.
    """
    app = FastAPI(title="hybridrl", docs_url=None, redoc_url=None, openapi_url=None)
    sessions = SessionTable(max_sessions, session_idle_s)
    most = max_body_mb or (BODY_MB if served.images is None else BODY_MB_WITH_IMAGES)
    app.add_middleware(Guard, token=token, is_session=sessions.is_open, max_body_mb=most)
    gate = gate or GuestGate(client, lambda: served.tokenizer)
    api = Api(gate, served, max_requests)
    _add_error_answers(app)
    _add_generation(app, api, sessions)
    _add_sessions(app, api, sessions)
    _add_control(app, api, gate)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": served.name, "object": "model", "created": 0, "owned_by": "hybridrl"}
        return {"object": "list", "data": [model | {"max_model_len": served.max_model_len}]}

    @app.get("/health")
    async def is_healthy() -> Response:
        fault = await client.health()
        return JSONResponse({"status": "ok"}) if fault is None else JSONResponse({"status": fault}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(metrics_text(await client.stats()), media_type=CONTENT_TYPE)

    return app


def _add_generation(app: FastAPI, api: Api, sessions: SessionTable) -> None:
    """The endpoints that generate. `Guard` finds the session of a request, in its path or as its key."""

    def session_of(http: HttpRequest) -> ServerSession | None:
        id = getattr(http.state, "session", None)
        return None if id is None else sessions.get(id)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, http: HttpRequest) -> Response:
        return await api.converse(ChatDialect(), body, http, session_of(http))

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, http: HttpRequest) -> Response:
        session = session_of(http)
        inner = body.inner(None if session is None else session.stored)
        return await api.converse(ResponsesDialect(body), inner, http, session, keep_from=body.keep_from)

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, http: HttpRequest) -> Response:
        return await api.converse(MessagesDialect(body.thinks), inner_request(body), http, session_of(http))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, http: HttpRequest) -> dict[str, int]:
        return {"input_tokens": await api.count(inner_request(body), session_of(http))}

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        return await api.answer(body, http, session_of(http))

    @app.post("/inference/v1/generate")
    async def generate(body: GenerateRequest, http: HttpRequest) -> Response:
        return await api.answer(body, http, session_of(http))


def _add_control(app: FastAPI, api: Api, gate: Gate) -> None:
    """vLLM's endpoints that end or hold requests and tell the weights. `Guard` says who may call them."""

    @app.post("/inference/v1/abort_requests")
    async def abort_requests(body: AbortRequest, http: HttpRequest) -> dict[str, Any]:
        count = await api.abort_named(body.request_ids, getattr(http.state, "session", None))
        return {"status": "aborted", "aborted": count}

    @app.post("/pause")
    async def pause(mode: PauseMode = "abort") -> dict[str, str]:
        await gate.pause(mode)
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict[str, str]:
        await gate.resume()
        return {"status": "resumed"}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": await gate.is_paused()}

    @app.get("/weight_info")
    async def weight_info() -> dict[str, str]:
        stats = await gate.stats()
        versions = [int(values["weights_version"]) for values in stats.values() if "weights_version" in values]
        if not versions:
            raise ApiError(503, "no weights generate yet", code="no_weights")
        return {"weight_version": str(min(versions))}


def _add_sessions(app: FastAPI, api: Api, sessions: SessionTable) -> None:
    """The endpoints that open, describe, export and close sessions."""

    @app.post("/sessions")
    async def open_session(body: OpenSession | None = None) -> dict[str, Any]:
        if reason := await api.in_thread(api.unsupported_reason, False):
            raise ApiError(400, f"no session can be opened: {reason}", code="unsupported_template")
        return sessions.open((body or OpenSession.model_validate({})).settings()).described()

    @app.get("/sessions/{id}")
    async def describe(id: str) -> dict[str, Any]:
        return sessions.get(id).described()

    @app.get("/sessions/{id}/trace")
    async def trace(id: str) -> Response:
        return JSONResponse(await api.in_thread(sessions.get(id).trace))

    @app.delete("/sessions/{id}")
    async def close(id: str) -> dict[str, Any]:
        session = sessions.close(id)
        return session.described() | {"closed": True, "messages": session.messages()}


def _add_error_answers(app: FastAPI) -> None:
    """Report every error in the format of the endpoint's API."""

    @app.exception_handler(ApiError)
    async def _(http: HttpRequest, error: ApiError) -> Response:
        headers = {"Retry-After": "1"} if error.status == 429 else None
        return JSONResponse(body_of_error(http.url.path, error), error.status, headers)

    @app.exception_handler(ValidationError)  # of the inner request
    @app.exception_handler(RequestValidationError)
    async def _(http: HttpRequest, error: RequestValidationError | ValidationError) -> Response:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"] if part not in ("body", "query")]
        name = place[0] if place and first["type"] != "json_invalid" else None
        message = f"{name or 'the body'}: {first['msg']}"
        wrong = ApiError(400, message, param=name, code=str(first["type"]))
        return JSONResponse(body_of_error(http.url.path, wrong), 400)

    @app.exception_handler(HTTPException)
    async def _(http: HttpRequest, error: HTTPException) -> Response:
        message = f"{http.method} {http.url.path}: {error.detail}"
        return JSONResponse(body_of_error(http.url.path, ApiError(error.status_code, message)), error.status_code)

    @app.exception_handler(Exception)
    async def _(http: HttpRequest, error: Exception) -> Response:
        message = f"{http.method} {http.url.path}: {type(error).__name__}: {error}"
        return JSONResponse(body_of_error(http.url.path, ApiError(500, message, code="internal_error")), 500)

    @app.exception_handler(ClientGone)
    async def _(http: HttpRequest, error: ClientGone) -> Response:
        return Response(status_code=499)  # the client is gone
