"""The inner conversation: messages as all dialects are translated into them, and when two of them are the same."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridrl.models.chat import TEXT, TEXT_AND_IMAGES, Message, clean_messages, fault_in_messages
from hybridrl.rollout.server.schema import ApiError, check_encodable

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
        sees_images: the model reads images (`PictureReader.taken`).

    Raises:
        ApiError: they are not a conversation.
    """
    check_encodable(messages, "messages")
    fault = fault_in_messages(messages, TEXT_AND_IMAGES if sees_images else TEXT)
    if fault is not None:
        raise ApiError(400, f"messages: {fault}", param="messages")
    names: dict[str, str] = {}
    found = []
    for number, message in enumerate(clean_messages(messages)):
        made = {name: value for name, value in message.items() if name not in _NOT_RENDERED}
        made["content"] = _flat(message.get("content")) or ""
        if message["role"] == "developer" and not knows_developer:
            made["role"] = "system"
        if message["role"] == "tool":
            made.setdefault("name", names.get(str(message.get("tool_call_id")), ""))
        calls = made.pop("tool_calls", None)
        if calls:
            made["tool_calls"] = [_inner_call(call, number) for call in _listed(calls, number)]
            names |= {call["id"]: call["function"]["name"] for call in made["tool_calls"]}
        found.append(made)
    return found


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


def _listed(calls: Any, number: int) -> list[Any]:
    if not isinstance(calls, list):
        raise ApiError(400, f"messages: message {number}: 'tool_calls' is not a list", param="messages")
    return calls


def _inner_call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise ApiError(
            400, f"messages: message {number}: a tool call has no function with a name: {call!r:.200}", param="messages"
        )
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": name, "arguments": parsed_arguments(function.get("arguments"))},
    }


def parsed_arguments(arguments: Any) -> Any:
    """The arguments of a call as an object; text that is none stays text."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def with_arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """The same messages with arguments of calls as JSON text, which some templates insist on."""
    found = []
    for message in messages:
        calls = [
            call | {"function": call["function"] | {"arguments": as_text(call["function"]["arguments"])}}
            for call in message.get("tool_calls") or ()
        ]
        found.append(message | {"tool_calls": calls} if calls else message)
    return found


def as_text(arguments: Any) -> str:
    """Arguments of a call as JSON text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _flat(content: Any) -> Any:
    """Text parts joined, because most templates take text only; with images, those that follow one another."""
    if not isinstance(content, list):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "image":
            parts.append({"type": "image", "digest": part["digest"]})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += "\n" + part["text"]
        else:
            parts.append({"type": "text", "text": part["text"]})
    if any(part["type"] == "image" for part in parts):
        return parts
    return parts[0]["text"] if parts else ""


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
    """As strict, without ids, spaces around text, and the difference between 1, 1.0 and "1" in arguments."""
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
