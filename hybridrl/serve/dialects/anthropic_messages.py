"""Anthropic's Messages."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hybridrl.models.chat import as_text
from hybridrl.serve.dialects.dialect import CallContext, Dialect, event
from hybridrl.serve.limits import body_of_error
from hybridrl.serve.replies import ReplyChoice
from hybridrl.serve.schema import ApiError, ChatRequest, short

#: what a block has before its deltas
_EMPTY: Mapping[str, dict[str, Any]] = {"text": {"text": ""}, "thinking": {"thinking": ""}, "tool_use": {"input": {}}}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
#: parameters that do not change the response; whether and how long a model thinks is up to its chat template
_IGNORED = frozenset({"betas", "cache_control", "inference_geo", "metadata", "service_tier"})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"container": (), "context_management": ({},), "mcp_servers": ([],)}


class MessagesRequest(BaseModel):
    """Body of `/v1/messages`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    messages: list[dict[str, Any]]
    max_tokens: int = Field(ge=1)
    system: str | list[dict[str, Any]] = ""
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] = {}
    thinking: dict[str, Any] = {}
    output_config: dict[str, Any] = {}  # `effort` has no effect

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    def inner(self) -> dict[str, Any]:
        """The body of the inner request.

        Raises:
            ApiError: names what is not supported.
        """
        for name, value in (self.model_extra or {}).items():
            if name not in _IGNORED and value not in _NEUTRAL.get(name, ()):
                raise ApiError(
                    400,
                    f"{name}={short(value)} is not supported by this server and may change the response: remove it",
                    param=name,
                    code="unsupported_parameter",
                )
        messages = [{"role": "system", "content": _text(self.system, "system")}] if self.system else []
        for number, message in enumerate(self.messages):
            messages += _inner_messages(message, number)
        parameters = {name: getattr(self, name) for name in ("model", "temperature", "top_p", "top_k")}
        return {
            **{name: value for name, value in parameters.items() if value is not None},
            "messages": messages,
            "continue_final_message": messages[-1]["role"] == "assistant" if messages else False,
            "response_format": self._inner_format(),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "tools": [_inner_tool(tool, number) for number, tool in enumerate(self.tools)],
            "tool_choice": self._inner_choice(),
            "parallel_tool_calls": not self.tool_choice.get("disable_parallel_tool_use", False),
        }

    def _inner_choice(self) -> Any:
        kind = self.tool_choice.get("type", "auto")
        if kind == "tool":
            return {"type": "function", "function": {"name": self.tool_choice.get("name")}}
        return {"auto": "auto", "none": "none", "any": "required"}.get(kind) or dict(self.tool_choice)

    def _inner_format(self) -> dict[str, Any]:
        """OpenAI's form of `output_config.format`."""
        output_format = self.output_config.get("format")
        if not isinstance(output_format, Mapping):
            return {"type": "text"}
        return {"type": output_format.get("type"), "json_schema": {"schema": output_format.get("schema")}}

    @property
    def thinks(self) -> bool:
        """Whether the answer has thoughts as blocks."""
        return self.thinking.get("type", "disabled") != "disabled"


class CountRequest(MessagesRequest):
    """Body of `/v1/messages/count_tokens`."""

    max_tokens: int = Field(1, ge=1)
    stream: Literal[False] = False


def _inner_tool(tool: Mapping[str, Any], number: int) -> dict[str, Any]:
    kind = tool.get("type", "custom")
    if kind != "custom":
        raise ApiError(
            400,
            f"tools: entry {number} of type {kind!r} is not supported: the server runs no tools; give input_schema, "
            "and run it in the client",
            param="tools",
            code="unsupported_parameter",
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _inner_messages(message: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """A message as one message of the inner conversation, or several: results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f"messages: message {number} has role {role!r}; it must be user or assistant", "messages")
    if isinstance(content, str) or content is None:
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise ApiError(400, f"messages: message {number}: 'content' must be text or a list of blocks", "messages")
    own_parts: list[Mapping[str, Any]] = []
    calls: list[dict[str, Any]] = []
    inner: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind in ("text", "image"):
            own_parts.append(block)
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = _content(block.get("content") or "", f"messages: message {number}")
            inner.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": result})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        else:
            raise ApiError(
                400,
                f"messages: message {number} has a block of type {kind!r}; text, image, tool_use, tool_result and "
                "thinking are supported",
                "messages",
            )
    if own_parts or calls or not inner:
        own: dict[str, Any] = {"role": role, "content": _content(own_parts, f"messages: message {number}")}
        if calls:
            own["tool_calls"] = calls
        if thoughts:
            own["reasoning_content"] = "\n".join(thoughts)
        inner.append(own)
    return inner


def _content(value: Any, where: str) -> str | list[dict[str, Any]]:
    """A string, the text of blocks, or with images the parts of OpenAI's chat API."""
    blocks = value if isinstance(value, list) else ()
    if not any(isinstance(part, Mapping) and part.get("type") == "image" for part in blocks):
        return _text(value, where)
    return [
        _image(block, where)
        if isinstance(block, Mapping) and block.get("type") == "image"
        else {"type": "text", "text": _text([block], where)}
        for block in blocks
    ]


def _image(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An image as a part of OpenAI's chat API."""
    source = block.get("source")
    source = source if isinstance(source, Mapping) else {}
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif source.get("type") == "url":
        url = str(source.get("url"))
    else:
        raise ApiError(
            400,
            f"{where} has an image with the source {short(source.get('type'))}; send it as base64",
            "messages",
            code="unsupported_image",
        )
    return {"type": "image_url", "image_url": {"url": url}}


def _text(value: Any, where: str) -> str:
    """The text of a string or of text blocks."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(_is_text(block) for block in value):
        return "\n".join(block["text"] for block in value)
    raise ApiError(400, f"{where}: only text and blocks of type text are supported here", where.partition(":")[0])


def _is_text(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "text" and isinstance(block.get("text"), str)


class MessagesDialect(Dialect):
    """`/v1/messages`.

    Args:
        thinks: thoughts are blocks of the answer.
    """

    id_prefix: ClassVar[str] = "msg"

    def __init__(self, thinks: bool = False) -> None:
        self._thinks = thinks

    def whole(self, exchange: CallContext, replies: Sequence[ReplyChoice]) -> dict[str, Any]:
        (reply,) = replies
        return {
            **self._head(exchange),
            "content": self._blocks(reply),
            **self._ending(exchange, reply),
            "usage": self._usage(exchange, [reply]),
        }

    def opening(self, exchange: CallContext) -> list[str]:
        head = {**self._head(exchange), "content": [], "stop_reason": None, "stop_sequence": None}
        return [_event("message_start", message=head | {"usage": self._usage(exchange, [])})]

    def choice(self, exchange: CallContext, index: int, reply: ReplyChoice) -> list[str]:
        events: list[str] = []
        for number, block in enumerate(self._blocks(reply)):
            deltas = {
                "text": lambda content: {"type": "text_delta", "text": content["text"]},
                "thinking": lambda content: {"type": "thinking_delta", "thinking": content["thinking"]},
                "tool_use": lambda content: {"type": "input_json_delta", "partial_json": as_text(content["input"])},
            }
            events += [
                _event("content_block_start", index=number, content_block=block | _EMPTY[block["type"]]),
                _event("content_block_delta", index=number, delta=deltas[block["type"]](block)),
                _event("content_block_stop", index=number),
            ]
        ending = self._ending(exchange, reply)
        return [*events, _event("message_delta", delta=ending, usage=self._usage(exchange, [reply]))]

    def closing(self, exchange: CallContext, replies: Sequence[ReplyChoice]) -> list[str]:
        return [_event("message_stop")]

    def failed(self, exchange: CallContext, error: ApiError) -> list[str]:
        return [event(body_of_error("/v1/messages", error), "error")]

    def keep_alive(self) -> str:
        return _event("ping")

    def _head(self, exchange: CallContext) -> dict[str, Any]:
        return {"id": exchange.id, "type": "message", "role": "assistant", "model": exchange.model}

    def _blocks(self, reply: ReplyChoice) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if reply.reasoning and self._thinks:
            blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.content or not reply.calls:
            blocks.append({"type": "text", "text": reply.content})
        for call in reply.calls:
            blocks.append(
                {"type": "tool_use", "id": call.tool_call_id, "name": call.name, "input": dict(call.arguments)}
            )
        return blocks

    def _ending(self, exchange: CallContext, reply: ReplyChoice) -> dict[str, Any]:
        reason = _STOP_REASONS.get(reply.finish_reason, "end_turn")
        ids, ends = reply.completion.token_ids, exchange.request.stops
        stopped = None
        if reason == "end_turn" and ends:
            text = exchange.tokenizer.decode(ids, skip_special_tokens=True)
            stopped = min((stop for stop in ends if stop in text), key=text.find, default=None)
        return {"stop_reason": "stop_sequence" if stopped else reason, "stop_sequence": stopped}

    def _usage(self, exchange: CallContext, replies: Sequence[ReplyChoice]) -> dict[str, Any]:
        cached = exchange.cached(replies)
        return {
            "input_tokens": len(exchange.prompt_ids) - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": exchange.generated(replies),
        }


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)


def inner_request(body: MessagesRequest) -> ChatRequest:
    """The inner request of a body."""
    request = ChatRequest.model_validate(body.inner())
    return request.with_thoughts_apart() if body.thinks else request
