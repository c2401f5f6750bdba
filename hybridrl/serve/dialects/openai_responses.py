"""OpenAI's Responses."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hybridrl.models.chat import Message, as_text
from hybridrl.serve.dialects.dialect import CallContext, Dialect, event
from hybridrl.serve.replies import ReplyChoice
from hybridrl.serve.schema import ApiError, ChatRequest, short

#: parameters that do not change the response; whether and how long a model thinks is up to its chat template
_IGNORED = frozenset(
    {
        "client_metadata",
        "include",
        "max_tool_calls",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "stream_options",
        "user",
    }
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
#: the extensions that chat requests take, too
_SAMPLING = ("model", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "session_id", "stream")
_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesRequest(BaseModel):
    """Body of `/v1/responses`."""

    model_config = ConfigDict(extra="allow")

    input: str | list[dict[str, Any]] = []
    instructions: str = ""
    max_output_tokens: int | None = Field(None, ge=1)
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    store: bool = True
    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    @property
    def keep_from(self) -> int | None:
        """Number of first messages that hold for this response alone; None: the conversation is not stored."""
        return int(bool(self.instructions)) if self.store else None

    def inner(self, stored: Callable[[str], list[Message]] | None) -> ChatRequest:
        """The inner request.

        Args:
            stored: the conversation that ends with an earlier answer; None outside of sessions.

        Raises:
            ApiError: names what is not supported.
        """
        extra = self.model_extra or {}
        for name, value in extra.items():
            if name not in _IGNORED and name not in _SAMPLING and value not in _NEUTRAL.get(name, ()):
                raise _unsupported(
                    f"{name}={short(value)} is not supported and may change the response: remove it", name
                )
        before: list[Message] = []
        if self.previous_response_id is not None:
            if stored is None:
                raise _unsupported(
                    "previous_response_id is known in sessions only: open one with POST /sessions, or send the whole "
                    "input",
                    "previous_response_id",
                )
            before = stored(self.previous_response_id)
        if self.instructions:  # they hold for this response alone, and replace earlier ones
            before.insert(0, {"role": "system", "content": self.instructions})
        sampling = {name: value for name, value in extra.items() if name in _SAMPLING}
        request = ChatRequest.model_validate(
            sampling
            | {
                "messages": [*before, *_messages_of(self.input)],
                "max_tokens": self.max_output_tokens,
                "tools": [_inner_tool(tool, number) for number, tool in enumerate(self.tools)],
                "tool_choice": self.tool_choice,
                "response_format": self._inner_format(),
                "parallel_tool_calls": self.parallel_tool_calls,
                "stream": self.stream,
            }
        )
        return request.with_thoughts_apart() if self.reasoning else request

    def _inner_format(self) -> dict[str, Any]:
        """The chat API's form of `text.format`."""
        text_format = self.text.get("format")
        if not isinstance(text_format, Mapping):
            return {"type": "text"}
        return {"type": text_format.get("type"), "json_schema": {"schema": text_format.get("schema")}}


def _unsupported(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported_parameter")


def _inner_tool(tool: Mapping[str, Any], number: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise _unsupported(
            f"tools: entry {number} of type {tool.get('type')!r} is not supported: the server runs no tools, only "
            "functions of the client are taken",
            "tools",
        )
    return {"type": "function", "function": {key: tool.get(key) for key in ("name", "description", "parameters")}}


def _messages_of(items: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Input items as messages; what the model wrote in one turn becomes one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    turn: Message | None = None  # of the model, to which items are added

    def model_turn() -> Message:
        nonlocal turn
        if turn is None:
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        return turn

    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") == "assistant":
            if turn is not None and (turn["content"] or turn.get("tool_calls")):
                turn = None
            model_turn()["content"] = _text(item.get("content"), number)
        elif kind == "message":
            turn = None
            messages.append({"role": item.get("role"), "content": _content(item.get("content"), number)})
        elif kind == "reasoning":
            if turn is not None and (turn["content"] or turn.get("tool_calls")):
                turn = None
            parts = item.get("content") or item.get("summary") or []
            thought = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
            if thought:
                model_turn()["reasoning_content"] = thought
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            model_turn().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            turn = None
            content = _content(item.get("output"), number)
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": content})
        else:
            raise _unsupported(
                f"input: item {number} of type {kind!r} is not supported; message, function_call, "
                "function_call_output and reasoning are",
                "input",
            )
    return messages


def _content(content: Any, number: int) -> str | list[dict[str, Any]]:
    """Text, or with images the parts of the chat API."""
    parts = content if isinstance(content, list) else ()
    if not any(isinstance(part, Mapping) and part.get("type") == "input_image" for part in parts):
        return _text(content, number)
    return [
        _image(part, number)
        if isinstance(part, Mapping) and part.get("type") == "input_image"
        else {"type": "text", "text": _text([part], number)}
        for part in parts
    ]


def _image(part: Mapping[str, Any], number: int) -> dict[str, Any]:
    if part.get("image_url") is None:
        raise _unsupported(
            f"input: item {number} has an image without image_url; uploads (file_id) are not read, send it as "
            "data:image/png;base64,...",
            "input",
        )
    return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part.get("detail")}}


def _text(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if not isinstance(content, list) or not all(
        isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS for part in parts
    ):
        raise _unsupported(f"input: item {number} has content that is neither text nor an image", "input")
    return "\n".join(str(part.get("text", "")) for part in parts)


class ResponsesDialect(Dialect):
    """`/v1/responses`.

    Args:
        body: the request.
    """

    id_prefix: ClassVar[str] = "resp"

    def __init__(self, body: ResponsesRequest) -> None:
        self._body = body
        self._numbers = itertools.count()

    def whole(self, exchange: CallContext, replies: Sequence[ReplyChoice]) -> dict[str, Any]:
        (reply,) = replies
        cut = reply.finish_reason == "length"
        return self._response(exchange, "incomplete" if cut else "completed") | {
            "output": self._items(exchange, reply),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": len(exchange.prompt_ids),
                "input_tokens_details": {"cached_tokens": exchange.cached(replies), "cache_write_tokens": 0},
                "output_tokens": exchange.generated(replies),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(exchange.prompt_ids) + exchange.generated(replies),
            },
        }

    def opening(self, exchange: CallContext) -> list[str]:
        begun = self._response(exchange, "in_progress")
        return [self._event("created", response=begun), self._event("in_progress", response=begun)]

    def choice(self, exchange: CallContext, index: int, reply: ReplyChoice) -> list[str]:
        events = []
        for number, item in enumerate(self._items(exchange, reply)):
            events.append(self._event("output_item.added", output_index=number, item=_without_content(item)))
            place = {"item_id": item["id"], "output_index": number}
            if item["type"] == "message":
                events += self._text_events(place, item["content"][0])
            elif item["type"] == "function_call":
                arguments = item["arguments"]
                events.append(self._event("function_call_arguments.delta", **place, delta=arguments))
                done = {"arguments": arguments, "name": item["name"]}
                events.append(self._event("function_call_arguments.done", **place, **done))
            events.append(self._event("output_item.done", output_index=number, item=item))
        return events

    def _text_events(self, place: Mapping[str, Any], part: Mapping[str, Any]) -> list[str]:
        where = {**place, "content_index": 0}
        text = part["text"]
        return [
            self._event("content_part.added", **where, part={**part, "text": ""}),
            self._event("output_text.delta", **where, delta=text, logprobs=[]),
            self._event("output_text.done", **where, text=text, logprobs=[]),
            self._event("content_part.done", **where, part=part),
        ]

    def closing(self, exchange: CallContext, replies: Sequence[ReplyChoice]) -> list[str]:
        response = self.whole(exchange, replies)
        return [self._event(response["status"], response=response)]

    def failed(self, exchange: CallContext, error: ApiError) -> list[str]:
        about = error.body()["error"]
        response = self._response(exchange, "failed") | {"error": {"code": "server_error", "message": about["message"]}}
        return [self._event("failed", response=response)]

    def _event(self, kind: str, **fields: Any) -> str:
        name = f"response.{kind}"
        return event({"type": name, "sequence_number": next(self._numbers), **fields}, name)

    def _response(self, exchange: CallContext, status: str) -> dict[str, Any]:
        body, request = self._body, exchange.request
        return {
            "id": exchange.id,
            "object": "response",
            "created_at": exchange.created,
            "status": status,
            "model": exchange.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions or None,
            "max_output_tokens": body.max_output_tokens,
            "metadata": (body.model_extra or {}).get("metadata") or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "text": {"format": self._body.text.get("format") or {"type": "text"}},
            "truncation": "disabled",
            "usage": None,
        }

    def _items(self, exchange: CallContext, reply: ReplyChoice) -> list[dict[str, Any]]:
        status = "incomplete" if reply.finish_reason == "length" else "completed"
        unique = exchange.id.removeprefix(f"{self.id_prefix}-")
        items: list[dict[str, Any]] = []
        if reply.reasoning and self._body.reasoning:
            thought = {"type": "reasoning_text", "text": reply.reasoning}
            items.append({"id": f"rs-{unique}", "type": "reasoning", "summary": [], "content": [thought]})
        if reply.content or not reply.calls:
            part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
            items.append(
                {"id": f"msg-{unique}", "type": "message", "role": "assistant", "status": status, "content": [part]}
            )
        for number, call in enumerate(reply.calls):
            items.append(
                {
                    "id": f"fc-{unique}-{number}",
                    "type": "function_call",
                    "call_id": call.tool_call_id,
                    "name": call.name,
                    "arguments": as_text(dict(call.arguments)),
                    "status": status,
                }
            )
        return items


def _without_content(item: Mapping[str, Any]) -> dict[str, Any]:
    """An output item before its content."""
    empty: Mapping[str, dict[str, Any]] = {
        "message": {"content": [], "status": "in_progress"},
        "function_call": {"arguments": "", "status": "in_progress"},
        "reasoning": {"content": []},
    }
    return {**item, **empty[item["type"]]}
