"""The ASGI application: OpenAI's endpoints, health and metrics over one `GenerationClient`."""

import hmac
import json
import logging
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from hybridrl.errors import UserError
from hybridrl.models.chat import clean_messages, encode, fault_in_messages
from hybridrl.rollout.client import GenerationClient
from hybridrl.rollout.request import GUEST_PRIORITY, Completion, Request
from hybridrl.rollout.server.pending import ClientGone, PendingRequests
from hybridrl.rollout.server.prometheus import CONTENT_TYPE, metrics_text
from hybridrl.rollout.server.responses import Answer
from hybridrl.rollout.server.schema import ApiError, ChatRequest, CompletionRequest

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 15.0  # proxies end a stream that is silent for longer than a minute


@dataclass(frozen=True)
class Served:
    """The model that is served.

    Attributes:
        name: what clients call it.
        tokenizer: renders chats and decodes tokens.
        max_model_len: most tokens of prompt and response together.
        vocab_size: token ids of prompts lie below it.
        heeds_seeds: the engine samples with a request's own seed.
    """

    name: str
    tokenizer: Any
    max_model_len: int
    vocab_size: int
    heeds_seeds: bool = True


def create_app(client: GenerationClient, served: Served, token: str | None) -> FastAPI:
    """The application, over one replica or over all of them.

    Args:
        client: generates; requests of a client that disconnects are aborted.
        served: the model behind it.
        token: the bearer token that `/v1/*` requires; None serves everybody.
    """
    app = FastAPI(title="hybridrl", docs_url=None, redoc_url=None, openapi_url=None)
    api = _Api(client, served)
    _add_error_answers(app)

    async def authorised(http: HttpRequest) -> None:
        given = http.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            raise ApiError(
                401,
                "wrong or missing token: send `Authorization: Bearer TOKEN` with this run's token",
                code="invalid_api_key",
            )

    guarded = [Depends(authorised)]

    @app.post("/v1/chat/completions", dependencies=guarded)
    async def chat(body: ChatRequest, http: HttpRequest) -> Response:
        return await api.answer(body, [api.chat_prompt(body)], http)

    @app.post("/v1/completions", dependencies=guarded)
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        return await api.answer(body, api.text_prompts(body), http)

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> dict[str, Any]:
        one = {"id": served.name, "object": "model", "created": 0, "owned_by": "hybridrl"}
        return {"object": "list", "data": [one | {"max_model_len": served.max_model_len}]}

    @app.get("/health")
    async def is_healthy() -> Response:
        fault = await client.health()
        return JSONResponse({"status": "ok"}) if fault is None else JSONResponse({"status": fault}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(metrics_text(await client.stats()), media_type=CONTENT_TYPE)

    return app


class _Api:
    """Makes token ids of a request body, and a response of the completions."""

    def __init__(self, client: GenerationClient, served: Served) -> None:
        self.client = client
        self.served = served

    def chat_prompt(self, body: ChatRequest) -> list[int]:
        """Token ids of a conversation, rendered as in training.

        Raises:
            ApiError: it is not a conversation, or the template refuses it.
        """
        fault = fault_in_messages(body.messages)
        if fault is not None:
            raise ApiError(400, f"messages: {fault}", param="messages")
        tokenizer = self.served.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ApiError(
                400, "the model has no chat template: use /v1/completions, or set model.custom_chat_template"
            )
        messages = [message | {"content": _flat(message.get("content"))} for message in clean_messages(body.messages)]
        arguments = {**body.chat_template_kwargs, "add_generation_prompt": True, "tokenize": False}
        try:
            text = tokenizer.apply_chat_template(messages, **arguments)
        except Exception as error:  # a template is a program and may fail in any way
            raise ApiError(
                400, f"the chat template refuses messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        return encode(tokenizer, [text])[0]

    def text_prompts(self, body: CompletionRequest) -> list[list[int]]:
        """Token ids of each prompt; the tokenizer adds special tokens to text."""
        found = []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                found.append(self.served.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens))
                continue
            bad = next((token for token in prompt if not 0 <= token < self.served.vocab_size), None)
            if bad is not None:
                raise ApiError(
                    400, f"prompt: token id {bad} is outside the vocabulary of {self.served.vocab_size}", param="prompt"
                )
            found.append(prompt)
        return found

    async def answer(
        self, body: ChatRequest | CompletionRequest, prompts: list[list[int]], http: HttpRequest
    ) -> Response:
        """Generate for every prompt, and answer at once or as a stream."""
        body.check_extras()
        if body.seed is not None and not self.served.heeds_seeds:
            raise ApiError(
                400,
                "seed: this engine does not use it; with rollout.full_determinism=True SGLang does on a GPU",
                param="seed",
                code="unsupported_parameter",
            )
        name = self.served.name
        if body.model not in (None, name):
            message = f"there is no model {body.model!r} here; this server has {name!r}"
            raise ApiError(404, message, "model", "model_not_found")
        id = f"{'chatcmpl' if isinstance(body, ChatRequest) else 'cmpl'}-{uuid.uuid4().hex}"
        session = http.headers.get("x-session-id") or body.session_id or ""
        try:
            requests = [
                Request(
                    f"{id}-{number}-{sample}",
                    prompt,
                    body.sampling(sample, self._room(body, prompt)),
                    session,
                    GUEST_PRIORITY,
                )
                for number, prompt in enumerate(prompts)
                for sample in range(body.n)
            ]
        except UserError as error:
            raise ApiError(400, str(error)) from error
        answer = Answer(id, name, self.served.tokenizer, body, prompts)
        pending = PendingRequests(self.client, requests, http)
        if body.stream:
            return StreamingResponse(_events(pending, answer), media_type="text/event-stream")
        completions: dict[int, Completion] = {}
        async with pending:
            while pending.pending:
                for index, completion in await _completed(pending):
                    completions[index] = completion
        return JSONResponse(answer.whole([completions[index] for index in range(len(requests))]))

    def _room(self, body: ChatRequest | CompletionRequest, prompt: list[int]) -> int:
        """Most tokens that the response may have.

        Raises:
            ApiError: the prompt is empty, or it and the response do not fit the model's length.
        """
        limit = self.served.max_model_len
        field = "messages" if isinstance(body, ChatRequest) else "prompt"
        if not prompt:
            raise ApiError(400, f"{field}: the prompt has no token", param=field)
        wanted = body.limit or max(limit - len(prompt), 1)
        if len(prompt) + wanted > limit:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens and {wanted} are requested, {len(prompt) + wanted} together; the "
                f"limit is {limit} (actor_rollout_ref.rollout.max_model_len). Shorten {field} or max_tokens",
                param=field,
                code="context_length_exceeded",
            )
        return wanted


async def _completed(pending: PendingRequests, timeout_s: float | None = None) -> list[tuple[int, Completion]]:
    """`pending.completed`, with the engine's errors as HTTP answers.

    Raises:
        ApiError: the engine refused the request, or it failed.
        ClientGone: the client has disconnected.
    """
    try:
        completed = await pending.completed(timeout_s)
    except ClientGone:
        raise
    except Exception as error:
        logger.exception("a request failed")
        raise ApiError(500, f"the engine failed: {type(error).__name__}: {error}", code="engine_error") from error
    for _, completion in completed:
        if completion.finish_reason == "error":
            raise ApiError(400, completion.error or "the engine refused the request", code="engine_refused")
    return completed


async def _events(pending: PendingRequests, answer: Answer) -> AsyncIterator[str]:
    """Server-sent events: each choice as a whole, as soon as it is complete."""
    completions: dict[int, Completion] = {}
    try:
        async with pending:
            for chunk in answer.opening():
                yield _event(chunk)
            while pending.pending:
                completed = await _completed(pending, _KEEP_ALIVE_S)
                if not completed:
                    yield ": generating\n\n"
                for index, completion in completed:
                    completions[index] = completion
                    yield _event(answer.chunk(index, completion))
        if answer.request.stream_options.get("include_usage"):
            yield _event(answer.usage_chunk([completions[index] for index in sorted(completions)]))
        yield "data: [DONE]\n\n"
    except ApiError as error:  # the status has been sent, so that an event has to report the error
        yield _event(error.body())
    except ClientGone:
        return


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _flat(content: Any) -> Any:
    """Text parts joined, because most templates take text only."""
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content)
    return content


def _add_error_answers(app: FastAPI) -> None:
    """Report every error in OpenAI's format."""

    @app.exception_handler(ApiError)
    async def _(http: HttpRequest, error: ApiError) -> Response:
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
        return JSONResponse(error.body(), error.status, headers)

    @app.exception_handler(RequestValidationError)
    async def _(http: HttpRequest, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"] if part != "body"]
        name = place[0] if place and first["type"] != "json_invalid" else None
        message = f"{name or 'the body'}: {first['msg']}"
        return JSONResponse(ApiError(400, message, param=name, code=str(first["type"])).body(), 400)

    @app.exception_handler(HTTPException)
    async def _(http: HttpRequest, error: HTTPException) -> Response:
        message = f"{http.method} {http.url.path}: {error.detail}"
        return JSONResponse(ApiError(error.status_code, message).body(), error.status_code)

    @app.exception_handler(ClientGone)
    async def _(http: HttpRequest, error: ClientGone) -> Response:
        return Response(status_code=499)  # the client is gone
