"""The ASGI application: OpenAI's endpoints, health and metrics over one `GenerationClient`."""

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from hybridrl.errors import UserError
from hybridrl.models.chat import clean_messages, encode, fault_in_messages
from hybridrl.rollout.client import GenerationClient
from hybridrl.rollout.request import GUEST_PRIORITY, Completion, Request
from hybridrl.rollout.server.limits import Guard
from hybridrl.rollout.server.pending import ClientGone, PendingRequests
from hybridrl.rollout.server.prometheus import CONTENT_TYPE, metrics_text
from hybridrl.rollout.server.responses import Answer, answer_in_tokens
from hybridrl.rollout.server.schema import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    check_encodable,
)

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 15.0  # proxies end a stream that is silent for longer than a minute
_MAX_SAMPLES = 1024  # of one call
_BYTES_PER_TOKEN = 32  # text with more is not tokenised, because it takes seconds to find out how long it is

_MAX_SESSION = 256

Body = ChatRequest | CompletionRequest | GenerateRequest
T = TypeVar("T")

_PREFIXES = {ChatRequest: "chatcmpl", CompletionRequest: "cmpl", GenerateRequest: "generate-tokens"}


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


def create_app(client: GenerationClient, served: Served, token: str | None, max_requests: int = 4096) -> FastAPI:
    """The application over a client, such as that of a run.

    Args:
        client: generates; requests of a client that disconnects are aborted.
        served: the model behind it.
        token: the bearer token that every path but `/health` and `/metrics` requires; None serves everybody.
        max_requests: samples that are generated or wait at the same time.
    """
    app = FastAPI(title="hybridrl", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, token=token)
    api = _Api(client, served, max_requests)
    _add_error_answers(app)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, http: HttpRequest) -> Response:
        return await api.answer(body, http)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        return await api.answer(body, http)

    @app.post("/inference/v1/generate")
    async def generate(body: GenerateRequest, http: HttpRequest) -> Response:
        return await api.answer(body, http)

    @app.get("/v1/models")
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

    def __init__(self, client: GenerationClient, served: Served, max_requests: int) -> None:
        self.client = client
        self.served = served
        self.max_requests = max_requests
        self._in_flight = 0
        # One thread: tokenizers are not made for several, and health and aborts must not wait for a long text.
        self._texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="texts")

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._texts, function, *args)

    def prompts(self, body: Body) -> list[list[int]]:
        """Token ids of each prompt."""
        if isinstance(body, ChatRequest):
            return [self._chat_prompt(body)]
        given = [body.token_ids] if isinstance(body, GenerateRequest) else body.prompts
        return [self._of_text(prompt) if isinstance(prompt, str) else self._of_tokens(prompt, body) for prompt in given]

    def _chat_prompt(self, body: ChatRequest) -> list[int]:
        """Token ids of a conversation, rendered as in training.

        Raises:
            ApiError: it is not a conversation, it is too long, or the template refuses it.
        """
        check_encodable(body.messages, "messages")
        fault = fault_in_messages(body.messages)
        if fault is not None:
            raise ApiError(400, f"messages: {fault}", param="messages")
        self._check_length(_text_bytes(body.messages), "messages")
        tokenizer = self.served.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ApiError(
                400, "the model has no chat template: use /v1/completions, or set model.custom_chat_template"
            )
        messages = [message | {"content": _flat(message.get("content"))} for message in clean_messages(body.messages)]
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program and may fail in any way
            raise ApiError(
                400, f"the chat template refuses messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        self._check_length(_text_bytes(text), "messages")
        return encode(tokenizer, [text])[0]

    def _of_text(self, prompt: str) -> list[int]:
        """Token ids of a text; the tokenizer adds special tokens."""
        check_encodable(prompt, "prompt")
        self._check_length(_text_bytes(prompt), "prompt")
        ids: list[int] = self.served.tokenizer.encode(prompt)
        return ids

    def _of_tokens(self, prompt: list[int], body: Body) -> list[int]:
        bad = next((token for token in prompt if not 0 <= token < self.served.vocab_size), None)
        if bad is not None:
            field = _field(body)
            message = f"{field}: token id {bad} is outside the vocabulary of {self.served.vocab_size}"
            raise ApiError(400, message, param=field)
        return prompt

    def _check_length(self, size: int, field: str) -> None:
        """Refuse a text that is too long for the model before it is tokenised.

        Raises:
            ApiError: names the limit.
        """
        limit = self.served.max_model_len
        if size > limit * _BYTES_PER_TOKEN:
            raise ApiError(
                400,
                f"the prompt has {size} bytes; the limit is {limit} tokens (actor_rollout_ref.rollout.max_model_len), "
                f"and texts of more than {_BYTES_PER_TOKEN} bytes per token are not tokenised. Shorten {field}, or "
                "send token ids",
                param=field,
                code="context_length_exceeded",
            )

    def _check(self, body: Body) -> None:
        """Refuse what needs no prompt to be refused.

        Raises:
            ApiError: names the parameter.
        """
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
        count = body.n * (len(body.prompts) if isinstance(body, CompletionRequest) else 1)
        if count > _MAX_SAMPLES:
            raise ApiError(400, f"n: {count} samples are requested; a call may ask for {_MAX_SAMPLES}", param="n")
        if self._in_flight + count > self.max_requests:
            raise ApiError(
                429,
                f"{self._in_flight} samples are in flight and {count} are requested; this server takes "
                f"{self.max_requests} (actor_rollout_ref.rollout.server.max_requests). Try again later",
                code="rate_limit_exceeded",
            )

    async def answer(self, body: Body, http: HttpRequest) -> Response:
        """Generate for every prompt, and answer at once or as a stream."""
        self._check(body)
        session = http.headers.get("x-session-id") or body.session_id or ""
        if len(session) > _MAX_SESSION:
            raise ApiError(400, f"the session's name is longer than {_MAX_SESSION} characters", param="session_id")
        prompts = await self._in_thread(self.prompts, body)
        self._check(body)  # others have come meanwhile
        id = f"{_PREFIXES[type(body)]}-{uuid.uuid4().hex}"
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
        pending = PendingRequests(self.client, requests, http)
        if isinstance(body, GenerateRequest):
            found = await self._all_of(pending)
            return JSONResponse(answer_in_tokens(body, body.request_id or id, self.served.name, prompts[0], found))
        answer = Answer(id, self.served.name, self.served.tokenizer, body, prompts)
        if body.stream:
            return _Stream(self, pending, answer)
        return JSONResponse(await self._in_thread(answer.whole, await self._all_of(pending)))

    async def _all_of(self, pending: PendingRequests) -> list[Completion]:
        completions: dict[int, Completion] = {}
        self.reserve(len(pending.requests))
        try:
            async with pending:
                while pending.pending:
                    for index, completion in await _completed(pending):
                        completions[index] = completion
        finally:
            self.reserve(-len(pending.requests))
        return [completions[index] for index in range(len(pending.requests))]

    def reserve(self, count: int) -> None:
        """Count samples in flight (or no longer, where negative)."""
        self._in_flight += count

    def _room(self, body: Body, prompt: list[int]) -> int:
        """Most tokens that the response may have.

        Raises:
            ApiError: the prompt is empty, or it and the response do not fit the model's length.
        """
        limit = self.served.max_model_len
        field = _field(body)
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


class _Stream(StreamingResponse):
    """A stream whose samples count as in flight until it ends, however it ends."""

    def __init__(self, api: _Api, pending: PendingRequests, answer: Answer) -> None:
        super().__init__(_events(pending, answer), media_type="text/event-stream")
        self._api = api
        self._count = len(pending.requests)
        api.reserve(self._count)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._api.reserve(-self._count)


def _field(body: Body) -> str:
    """Where a body has its prompt."""
    return {ChatRequest: "messages", CompletionRequest: "prompt", GenerateRequest: "token_ids"}[type(body)]


def _text_bytes(value: Any) -> int:
    """Bytes of all texts in plain data."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if isinstance(value, Mapping):
        return sum(map(_text_bytes, value.values()))
    return sum(map(_text_bytes, value)) if isinstance(value, list) else 0


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
        headers = {"Retry-After": "1"} if error.status == 429 else None
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

    @app.exception_handler(Exception)
    async def _(http: HttpRequest, error: Exception) -> Response:
        message = f"{http.method} {http.url.path}: {type(error).__name__}: {error}"
        return JSONResponse(ApiError(500, message, code="internal_error").body(), 500)

    @app.exception_handler(ClientGone)
    async def _(http: HttpRequest, error: ClientGone) -> Response:
        return Response(status_code=499)  # the client is gone
