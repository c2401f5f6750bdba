"""The handling of a call: its body becomes token ids, then requests of the engine, then an answer."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from hybridrl.chat.parsers.tool_parser import ToolParser
from hybridrl.chat.session_images import ImageReader, images_in
from hybridrl.chat.turns import Turns
from hybridrl.errors import RolloutError, UserError
from hybridrl.models.chat import Message
from hybridrl.registry import TOOL_PARSERS
from hybridrl.rollout.client import GenerationClient
from hybridrl.rollout.request import CLIENT_PRIORITY, Completion, Request
from hybridrl.serve.client_images import ClientImage, PictureReader, Prompt, pictures_in, placed, with_patches
from hybridrl.serve.conversation import inner_messages, inner_tools
from hybridrl.serve.dialects.dialect import CallContext, Dialect
from hybridrl.serve.pending import PendingRequests
from hybridrl.serve.replies import ReplyChoice, reply_of
from hybridrl.serve.response_objects import ResponseBuilder, answer_in_tokens
from hybridrl.serve.schema import (
    TOO_LONG,
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    check_encodable,
    short,
)
from hybridrl.serve.session_table import ServerSession, fingerprint
from hybridrl.serve.streams import answered, as_replies, as_stream, text_events, turn_events

_MAX_SAMPLES = 1024  # of one call
_BYTES_PER_TOKEN = 32  # text with more is not tokenised, because it takes seconds to find out how long it is
_MAX_SESSION = 256
_TAIL = 8  # tokens of a prompt among which the opening of a thought is looked for
_RETRY_HEADER = "x-stainless-retry-count"  # of OpenAI's and Anthropic's clients

Body = ChatRequest | CompletionRequest | GenerateRequest
T = TypeVar("T")

_PREFIXES: dict[type, str] = {CompletionRequest: "cmpl", GenerateRequest: "generate-tokens"}
_TRIAL_TOOL = {
    "type": "function",
    "function": {"name": "trial", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class Served:
    """The model that is served.

    Attributes:
        name: what clients call it.
        tokenizer: renders chats and decodes tokens.
        max_model_len: most tokens of prompt and response together.
        vocab_size: token ids of prompts lie below it.
        heeds_seeds: the engine samples with a request's own seed.
        turns: renders conversations; None: by the tokenizer's chat template and its EOS.
        parser: reads tool calls; None: `hermes`.
        eos_token_ids: end a turn; None: the tokenizer's EOS.
        constrains: the engine keeps responses to a JSON schema.
        records_routing: answers of `/inference/v1/generate` have the experts of their tokens.
        images: makes patches of images; None: the model reads text alone. `turns` knows its processor.
    """

    name: str
    tokenizer: Any
    max_model_len: int
    vocab_size: int
    heeds_seeds: bool = True
    turns: Turns | None = None
    parser: ToolParser | None = None
    eos_token_ids: Sequence[int] | None = None
    constrains: bool = False
    images: ImageReader | None = None
    records_routing: bool = False


class Api:
    """Answers requests of all dialects.

    Args:
        client: generates.
        served: the model behind it.
        max_requests: samples that are generated or wait at the same time.
    """

    def __init__(self, client: GenerationClient, served: Served, max_requests: int) -> None:
        self.client = client
        self.served = served
        self.max_requests = max_requests
        self.ends = list(served.eos_token_ids or [served.tokenizer.eos_token_id])
        self.turns = served.turns or Turns(served.tokenizer, self.ends)
        self.parser = served.parser or TOOL_PARSERS.get("hermes")()
        self._knows_developer = "developer" in str(getattr(served.tokenizer, "chat_template", None) or "")
        self._unsupported_reasons: dict[bool, str | None] = {}
        self._in_flight = 0
        self._ids_by_name: dict[
            tuple[str | None, str], set[str]
        ] = {}  # session and a call's name -> ids of its requests
        # One thread: tokenizers are not made for several, and health and aborts must not wait for a long text.
        self._texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="texts")
        self._pictures = None if served.images is None else PictureReader(served.images, served.max_model_len)
        self._pixels = ThreadPoolExecutor(max_workers=1, thread_name_prefix="images")

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function that renders or tokenises, in the thread for that."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, function, *args)

    # ------------------------------------------------------------------ prompts

    def prompts(self, body: CompletionRequest | GenerateRequest) -> list[list[int]]:
        """Token ids of each prompt."""
        prompts = [body.token_ids] if isinstance(body, GenerateRequest) else body.prompts
        return [
            self._of_text(prompt) if isinstance(prompt, str) else self._of_tokens(prompt, body) for prompt in prompts
        ]

    def conversation(self, body: ChatRequest) -> tuple[list[Message], list[dict[str, Any]]]:
        """Messages and tools of a request in their inner form.

        Raises:
            ApiError: they are none, or too long.
        """
        messages = inner_messages(body.messages, self._knows_developer, self._pictures is not None)
        self._check_length(_text_bytes(body.messages) + _text_bytes(body.tools), "messages")
        if not getattr(self.served.tokenizer, "chat_template", None):
            raise ApiError(
                400, "the model has no chat template: use /v1/completions, or set model.custom_chat_template"
            )
        return messages, inner_tools(body.tools)

    async def with_images(
        self, body: ChatRequest, session: ServerSession | None
    ) -> tuple[ChatRequest, dict[str, ClientImage]]:
        """A request that names its images by digest, and these images.

        Raises:
            ApiError: an image cannot be taken.
        """
        if self._pictures is None:  # an image is refused as any other part that is no text
            return body, {}
        session_pictures = {} if session is None else session.pictures
        loop = asyncio.get_running_loop()
        messages, pictures = await loop.run_in_executor(
            self._pixels, self._pictures.extract, body.messages, session_pictures
        )
        return body.model_copy(update={"messages": messages}), pictures

    def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        session: ServerSession | None,
        pictures: Mapping[str, ClientImage],
    ) -> Prompt:
        """A conversation as tokens: those of the session's earlier calls, and the rest rendered as in training.

        Args:
            pictures: the images of the messages by digest.

        Raises:
            ApiError: it is too long, or the template refuses it.
        """
        if session is not None:
            continued = session.prompt(self.turns, messages, tools, pictures)
            if continued is not None:
                return continued
        try:
            text = self.turns.text(messages, tools)
        except RolloutError as error:
            reason = error.__cause__ or error
            message = f"the chat template refuses messages: {type(reason).__name__}: {reason}"
            raise ApiError(400, message, param="messages") from error
        self._check_length(_text_bytes(text), "messages")
        try:
            ids = self.turns.expanded(self.turns.encoded(text), images_in(with_patches(messages, pictures)))
            return placed(ids, pictures_in(messages, pictures), self.turns.image_config)
        except RolloutError as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error

    def _opening_and_prompt(
        self,
        body: ChatRequest,
        messages: list[Message],
        tools: Sequence[Mapping[str, Any]],
        session: ServerSession | None,
        pictures: Mapping[str, ClientImage],
    ) -> tuple[str, Prompt]:
        """The beginning of the turn that the model does not write, and the prompt with it.

        Args:
            messages: the conversation; a last message whose text the model goes on with is taken out of it.
            pictures: its images by digest.

        Raises:
            ApiError: see `chat_prompt`; or the format of calls has no beginning.
        """
        opening_text = str(messages.pop()["content"]) if body.continue_final_message else ""
        prompt = self.chat_prompt(messages, tools, session, pictures)
        if body.forces_call:
            opening = self.parser.opening(body.forced_function)
            if opening is None:
                raise ApiError(
                    400,
                    f"tool_choice={short(body.tool_choice)} is not supported for the model's format of calls "
                    "(rollout.multi_turn.format), in which not every call begins alike. Take 'auto'",
                    param="tool_choice",
                    code="unsupported_parameter",
                )
            _, thought, after = self.served.tokenizer.decode(prompt.ids[-_TAIL:]).rpartition("<think>")
            opening_text = f"\n</think>\n\n{opening}" if thought and not after.strip() else opening
        if opening_text:
            prompt = prompt.with_more(self.turns.encoded(self.turns.harmless(opening_text)))
        return opening_text, prompt

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
                code=TOO_LONG,
            )

    def unsupported_reason(self, with_tools: bool) -> str | None:
        """Return why conversations cannot be continued token by token with this chat template, or None."""
        if with_tools not in self._unsupported_reasons:
            self._unsupported_reasons[with_tools] = None
            try:
                self.turns.check([_TRIAL_TOOL] if with_tools else None)
            except RolloutError as error:
                self._unsupported_reasons[with_tools] = str(error)
        return self._unsupported_reasons[with_tools]

    async def count(self, body: ChatRequest, session: ServerSession | None) -> int:
        """The tokens that a conversation would have as a prompt."""
        body.check_extras()
        body, pictures = await self.with_images(body, session)
        messages, tools = await self.in_thread(self.conversation, body)
        return len((await self.in_thread(self._opening_and_prompt, body, messages, tools, session, pictures))[1].ids)

    # ------------------------------------------------------------------ refusals

    def _check(self, body: Body, session: ServerSession | None) -> None:
        """Refuse parameters that can be checked without the prompt.

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
        if body.json_schema is not None and (not self.served.constrains or (session and session.settings.fixed)):
            why = (
                "this engine cannot keep to a schema; vllm can"
                if not self.served.constrains
                else "what it leaves of the model's distribution is not what training computes log-probabilities with, "
                "and this session samples as training does (rollout.agent.sampling=run)"
            )
            raise ApiError(
                400,
                f"response_format={short(getattr(body, 'response_format', None))} is not supported here: {why}. Ask "
                "for the format in the prompt",
                param="response_format",
                code="unsupported_parameter",
            )
        name = self.served.name
        if body.model not in (None, name) and session is None:  # agents name the model that they were written for
            message = f"there is no model {body.model!r} here; this server has {name!r}"
            raise ApiError(404, message, "model", "model_not_found")
        self._check_count(body.n * (len(body.prompts) if isinstance(body, CompletionRequest) else 1))

    def _check_count(self, count: int) -> None:
        if count > _MAX_SAMPLES:
            raise ApiError(400, f"n: {count} samples are requested; a call may ask for {_MAX_SAMPLES}", param="n")
        if self._in_flight + count > self.max_requests:
            raise ApiError(
                429,
                f"{self._in_flight} samples are in flight and {count} are requested; this server takes "
                f"{self.max_requests} (actor_rollout_ref.rollout.server.max_requests). Try again later",
                code="rate_limit_exceeded",
            )

    # ------------------------------------------------------------------ answers

    async def answer(
        self, body: CompletionRequest | GenerateRequest, http: HttpRequest, session: ServerSession | None
    ) -> Response:
        """Generate for every prompt, and answer at once or as a stream."""
        with nullcontext() if session is None else session.noting_length():
            return await self._answer(body, http, session)

    async def _answer(
        self, body: CompletionRequest | GenerateRequest, http: HttpRequest, session: ServerSession | None
    ) -> Response:
        body = body if session is None else session.with_defaults(body)
        self._check(body, session)
        name = _session_name(body, http, session)
        prompts = [Prompt(ids) for ids in await self.in_thread(self.prompts, body)]
        self._check(body, session)  # others have come meanwhile
        id = f"{_PREFIXES[type(body)]}-{uuid.uuid4().hex}"
        requests = self._requests(id, body, prompts, name, session)
        pending = PendingRequests(self.client, requests, http, self._named_as([id, body.request_id], session, requests))

        def noted(index: int, completion: Completion) -> Completion:
            if session is not None and completion.finish_reason != "abort":
                session.tree.add(requests[index].prompt_ids, completion)
            return completion

        if isinstance(body, GenerateRequest):
            completions = await self._all_of(pending, noted)
            return JSONResponse(
                answer_in_tokens(body, body.request_id or id, self.served.name, prompts[0].ids, completions)
            )
        answer = ResponseBuilder(id, self.served.name, self.served.tokenizer, body, [prompt.ids for prompt in prompts])
        if body.stream:
            return _Stream(self, len(requests), text_events(pending, answer, noted))
        return JSONResponse(await self.in_thread(answer.whole, await self._all_of(pending, noted)))

    async def converse(
        self,
        dialect: Dialect,
        body: ChatRequest,
        http: HttpRequest,
        session: ServerSession | None,
        keep_from: int | None = None,
    ) -> Response:
        """Generate the model's next turn, and answer at once or as a stream.

        Args:
            dialect: how the client speaks.
            body: the inner request.
            session: continues its conversations, and keeps this one.
            keep_from: keep the conversation from this message on, under the answer's id (`previous_response_id`).
        """
        with nullcontext() if session is None else session.noting_length():
            return await self._converse(dialect, body, http, session, keep_from)

    async def _converse(
        self,
        dialect: Dialect,
        body: ChatRequest,
        http: HttpRequest,
        session: ServerSession | None,
        keep_from: int | None,
    ) -> Response:
        body = body if session is None else session.with_defaults(body)
        self._check(body, session)
        name = _session_name(body, http, session)
        body, pictures = await self.with_images(body, session)
        messages, tools = await self.in_thread(self.conversation, body)
        if session is not None and tools and (reason := await self.in_thread(self.unsupported_reason, True)):
            raise ApiError(400, f"tools: {reason}", param="tools", code="unsupported_parameter")
        opening, prompt = await self.in_thread(self._opening_and_prompt, body, messages, tools, session, pictures)
        self._check(body, session)  # others have come meanwhile
        id = f"{dialect.id_prefix}-{uuid.uuid4().hex}"
        exchange = CallContext(id, body.model or self.served.name, self.served.tokenizer, body, prompt.ids)
        key = fingerprint(dialect.id_prefix, body)
        stored_replies = (
            session.remembered(key) if session is not None and http.headers.get(_RETRY_HEADER, "0") != "0" else None
        )
        if stored_replies is not None:  # the client did not get the answer to this request, and asks again
            if body.stream:
                return _Stream(self, 0, turn_events(dialect, exchange, as_stream(stored_replies)))
            return JSONResponse(await self.in_thread(dialect.whole, exchange, stored_replies))
        requests = self._requests(id, body, [prompt], name, session)
        pending = PendingRequests(self.client, requests, http, self._named_as([id, body.request_id], session, requests))
        replies: dict[int, ReplyChoice] = {}

        def read(index: int, completion: Completion) -> ReplyChoice:
            new_id = _new_id if session is None else session.new_call_id
            reply = reply_of(self.served.tokenizer, self.parser, self.ends, completion, body, new_id, opening)
            replies[index] = reply
            if session is not None and completion.finish_reason != "abort":
                session.add(messages, tools, prompt, reply)
                if keep_from is not None:
                    session.store(id, [*messages[keep_from:], *inner_messages([reply.whole_message()])])
                if len(replies) == len(requests):
                    session.remember(key, [replies[index] for index in sorted(replies)])
            return reply

        async def replied(index: int, completion: Completion) -> ReplyChoice:
            return await self.in_thread(read, index, completion)

        if body.stream:
            events = turn_events(dialect, exchange, as_replies(pending, replied))
            return _Stream(self, len(requests), events, session)
        self.reserve(len(requests), session)
        try:
            async for _ in as_replies(pending, replied):
                pass
        finally:
            self.reserve(-len(requests), session)
        return JSONResponse(await self.in_thread(dialect.whole, exchange, [replies[i] for i in sorted(replies)]))

    async def abort_named(self, names: Sequence[str], session: str | None) -> int:
        """Abort calls by their `request_id` or the id of their answer, and return the number of aborted requests.

        Args:
            session: whose calls they are; None: of any session, and outside of them.
        """
        call_names = set(names)
        ids = {
            id
            for (owner, name), requests in self._ids_by_name.items()
            if name in call_names and session in (None, owner)
            for id in requests
        }
        if ids:
            await self.client.abort(sorted(ids))
        return len(ids)

    @contextmanager
    def _named_as(
        self, names: Sequence[str | None], session: ServerSession | None, requests: Sequence[Request]
    ) -> Iterator[None]:
        """Context in which the requests of a call can be aborted by its names."""
        owner, ids = None if session is None else session.id, {request.id for request in requests}
        keys = [(owner, name) for name in names if name]
        for key in keys:
            self._ids_by_name.setdefault(key, set()).update(ids)
        try:
            yield
        finally:
            for key in keys:
                self._ids_by_name[key] -= ids
                if not self._ids_by_name[key]:
                    del self._ids_by_name[key]

    def _requests(
        self, id: str, body: Body, prompts: Sequence[Prompt], name: str, session: ServerSession | None
    ) -> list[Request]:
        """One request per prompt and sample.

        Raises:
            ApiError: a prompt is too long, or a setting of the request cannot be sampled with.
        """
        try:
            return [
                Request(
                    f"{id}-{number}-{sample}",
                    prompt.ids,
                    body.sampling(sample, self._room(body, prompt, session)),
                    name,
                    CLIENT_PRIORITY,
                    images=prompt.images,
                    routing=self.served.records_routing and isinstance(body, GenerateRequest),
                )
                for number, prompt in enumerate(prompts)
                for sample in range(body.n)
            ]
        except UserError as error:
            raise ApiError(400, str(error)) from error

    async def _all_of(
        self, pending: PendingRequests, noted: Callable[[int, Completion], Completion]
    ) -> list[Completion]:
        completions: dict[int, Completion] = {}
        self.reserve(len(pending.requests))
        try:
            async with pending:
                while pending.pending:
                    for index, completion in await answered(pending):
                        completions[index] = noted(index, completion)
        finally:
            self.reserve(-len(pending.requests))
        return [completions[index] for index in range(len(pending.requests))]

    def reserve(self, count: int, session: ServerSession | None = None) -> None:
        """Count samples in flight (or no longer, where negative)."""
        self._in_flight += count
        if session is not None:
            session.in_flight += count

    def _room(self, body: Body, prompt: Prompt, session: ServerSession | None) -> int:
        """Most tokens that the response may have. In a session, a larger request is cut to the room that there is.

        Raises:
            ApiError: the prompt is empty, or it and the response do not fit the model's length or the session's.
        """
        limit, length = self.served.max_model_len, len(prompt.ids)
        field = _field(body)
        if not length:
            raise ApiError(400, f"{field}: the prompt has no token", param=field)
        room = limit - length
        key = "actor_rollout_ref.rollout.max_model_len"
        session_room = None if session is None else session.room(prompt)
        if session_room is not None and session_room < room:
            room, key = session_room, "data.max_response_length, for all tokens after the first prompt"
        requested = body.limit or max(room, 1)
        if session is not None and room > 0:
            return min(requested, room)
        if requested > room:
            raise ApiError(
                400,
                f"the prompt has {length} tokens and {requested} are requested, {length + requested} together; the "
                f"limit is {length + room} ({key}). Shorten {field} or max_tokens",
                param=field,
                code=TOO_LONG,
            )
        return requested


class _Stream(StreamingResponse):
    """A stream whose samples count as in flight until it ends, however it ends."""

    def __init__(
        self, api: Api, count: int, events: AsyncGenerator[str, None], session: ServerSession | None = None
    ) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events = events
        self._api = api
        self._count = count
        self._session = session
        api.reserve(count, session)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):  # a client may go while a part is sent
                await super().__call__(scope, receive, send)
        finally:
            self._api.reserve(-self._count, self._session)


def _session_name(body: Body, http: HttpRequest, session: ServerSession | None) -> str:
    """Return the name that requests for the same replica share."""
    name = http.headers.get("x-session-id") or body.session_id or "" if session is None else session.id
    if len(name) > _MAX_SESSION:
        raise ApiError(400, f"the session's name is longer than {_MAX_SESSION} characters", param="session_id")
    return name


def _field(body: Body) -> str:
    """The field of a body that has its prompt."""
    return {ChatRequest: "messages", CompletionRequest: "prompt", GenerateRequest: "token_ids"}[type(body)]


def _new_id() -> str:
    return f"call{uuid.uuid4().hex[:5]}"


def _text_bytes(value: Any) -> int:
    """Bytes of all texts in plain data."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if isinstance(value, Mapping):
        return sum(map(_text_bytes, value.values()))
    return sum(map(_text_bytes, value)) if isinstance(value, list) else 0
