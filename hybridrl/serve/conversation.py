"""The inner conversation: messages as all dialects are translated into them, and when two of them are the same."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridrl.models.chat import TEXT, TEXT_AND_IMAGES, Message, check_messages, normal_messages
from hybridrl.serve.schema import ApiError, check_encodable

#: what a client adds to messages of the model that it returns, and no template reads
_NOT_RENDERED = ("refusal", "audio", "annotations", "function_call", "token_ids", "prefix")
_NO_PARAMETERS = {"type": "object", "properties": {}}


def inner_messages(
    messages: Sequence[Mapping[str, Any]], knows_developer: bool = False, sees_images: bool = False
) -> list[Message]:
    """The messages of OpenAI's chat API in one form: text for content, arguments of calls as objects.

    The content of a message with images is a list of parts: text, and `{"type": "image", "digest": ...}`.

    Answers of tools get the name of the tool, which some templates write.

    Args:
        knows_developer: the chat template has the role `developer`; elsewhere it becomes `system`.
        sees_images: the model reads images (`PictureReader.extract`).

    Raises:
        ApiError: they are not a conversation.
    """
    check_encodable(messages, "messages")
    try:
        check_messages(messages, TEXT_AND_IMAGES if sees_images else TEXT)
    except ValueError as error:
        raise ApiError(400, f"messages: {error}", param="messages") from None
    inner = []
    for message in normal_messages(messages):
        inner_message = {name: value for name, value in message.items() if name not in _NOT_RENDERED}
        if message["role"] == "developer" and not knows_developer:
            inner_message["role"] = "system"
        if message["role"] == "tool":
            inner_message.setdefault("name", "")
        if "tool_calls" in inner_message:
            inner_message["tool_calls"] = [
                {
                    "id": str(call.get("id") or ""),
                    "type": "function",
                    "function": {name: call["function"][name] for name in ("name", "arguments")},
                }
                for call in inner_message["tool_calls"]
            ]
        inner.append(inner_message)
    return inner


def inner_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Descriptions of tools, each with its type and with parameters."""
    return [
        {"type": "function", "function": dict(tool["function"]) | _with_parameters(tool["function"])} for tool in tools
    ]


def _with_parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "description": function.get("description") or "",
        "parameters": function.get("parameters") or _NO_PARAMETERS,
    }


# ------------------------------------------------------------------ when two messages are the same


def _strict(message: Message) -> Any:
    """Role, text, images by their patches, and calls with ids, names and the values of arguments.

    Thoughts do not count: clients drop them.
    """
    calls = [
        [call["id"], call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls") or ()
    ]
    return [message["role"], message["content"], calls, message.get("tool_call_id")]


def _loose(message: Message) -> Any:
    """As `_strict`, without ids, spaces around text, and the difference between 1, 1.0 and "1" in arguments."""
    content = message["content"]
    if isinstance(content, list):
        content = [part | {"text": part["text"].strip()} if part["type"] == "text" else part for part in content]
    else:
        content = content.strip()
    calls = [
        [call["function"]["name"], _plain(call["function"]["arguments"])] for call in message.get("tool_calls") or ()
    ]
    return [message["role"], content, calls]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


#: `rollout.agent.match` -> what of a message has to be the same
MATCHERS: Mapping[str, Callable[[Message], Any]] = {"strict": _strict, "loose": _loose}


def keys_of(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], matcher: Callable[[Message], Any]
) -> list[bytes]:
    """A key of each beginning of a conversation: entry k is that of the first k messages."""
    keys = [digest(b"", list(tools))]
    for message in messages:
        keys.append(digest(keys[-1], matcher(message)))
    return keys


def digest(before: bytes, value: Any) -> bytes:
    """A key of plain data after what has the key `before`."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(before + text.encode("utf-8", "surrogatepass")).digest()
