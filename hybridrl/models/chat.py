"""Chat messages, and the token ids of rendered text, the same in training, validation and serving.

The text is tokenised without adding special tokens. The chat template has already written them, and a second BOS would
change what the model sees.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from hybridrl.utils.finite_json import NoNumberError, finite_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
#: ids of tokens, and the first and past-the-last character of each, or none
Tokens = tuple[list[int], list[tuple[int, int]]]
TEXT = ("text",)
TEXT_AND_IMAGES = ("text", "image", "video")
#: fields with thoughts of the assistant, as different libraries and chat templates call them
THOUGHTS = ("reasoning_content", "reasoning", "thinking")

#: roles that chat templates have
ROLES = ("system", "developer", "user", "assistant", "tool")
_USUAL_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
_USUAL_ROLES |= {"ai": "assistant", "model": "assistant"}
#: the beginning of messages that were written as text, in JSON or in Python
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]""")
#: the beginning of a list of objects, of an object, and of either that was written as text twice
_JSON_AS_TEXT = re.compile(r"""\s*"?\s*(?:\[\s*\{|\{\s*\\?['"])""")
#: names under which an object holds a list of messages
_NAMES_OF_MESSAGES = {"messages", "conversations", "conversation"}
#: fields of a message, as different libraries call them
_MESSAGE_FIELDS = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
#: what data sets call the arguments of a call
_ARGUMENTS = ("parameters", "args", "kwargs", "input", "params")
_EXAMPLE = '[{"role": "user", "content": "..."}]'

_CHARACTERS = 64  # of a text that are tokenised at first per token of the limit; tokens have 3 to 5 on average
_FEWEST = 64  # tokens of the limit that the first part counts with


def check_messages(value: Any, kinds: Sequence[str] = TEXT) -> None:
    """Check that `value` is a list of chat messages.

    Args:
        kinds: types of the parts that the content of a message may have.

    Raises:
        ValueError: it is not; the text is a clause about the value.
    """
    if isinstance(value, str):
        beginning = f"{value[:60]!r}{'...' if len(value) > 60 else ''}"
        raise ValueError(f"it is text ({beginning}), not a list of messages; write {_EXAMPLE}")
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        kind = "missing" if value is None else type(value).__name__
        raise ValueError(f"it is {kind}, not a list of messages; write {_EXAMPLE}")
    if not value:
        raise ValueError(f"the list of messages is empty; write at least {_EXAMPLE}")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {number} is {type(message).__name__}, not an object with 'role' and 'content'")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            advice = "; write 'role' for 'from', and 'content' for 'value'" if "from" in message else ""
            keys = ", ".join(map(str, message)) or "none"
            raise ValueError(f"message {number} has no 'role' (keys found: {keys}){advice}")
        if (usual_role := _usual_role(role)) is not None:
            raise ValueError(
                f"message {number} has the role {role!r}, which chat templates do not know; write {usual_role!r}"
            )
        if content is None and not message.get("tool_calls"):
            old = "; write 'tool_calls' for 'function_call'" if message.get("function_call") else ""
            raise ValueError(f"message {number} ({role}) has no 'content'{old}")
        try:
            _check_content(content, kinds)
            _check_calls(message.get("tool_calls"))
            _check_thoughts(message)
        except ValueError as error:
            raise ValueError(f"message {number} ({role}): {error}") from None


def _usual_role(role: str) -> str | None:
    """Return the name that chat templates have for a role of another library; None for other roles."""
    lower = role.strip().lower()
    usual_role = _USUAL_ROLES.get(lower, lower)
    return usual_role if usual_role in ROLES and usual_role != role else None


def _check_calls(calls: Any) -> None:
    """Check that `tool_calls` of a message is a list of calls."""
    if calls is None:
        return
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise ValueError("'tool_calls' is not a list")
    for call in calls:
        function = _function_of(call)
        name = function.get("name") if function is not None else None
        if not isinstance(name, str) or not name:
            raise ValueError(f"a tool call has no function with a name: {call!r:.200}")
        assert function is not None
        other = next((word for word in _ARGUMENTS if word in function), None)
        if other is not None and function.get("arguments") is None:
            raise ValueError(
                f"the call of {name} has {other!r}, which no template reads; write 'arguments': {call!r:.200}"
            )
        if not _are_arguments(function.get("arguments")):
            raise ValueError(
                f"the arguments of the call of {name} are {type(function['arguments']).__name__}, which no parser of "
                f"calls reads; write an object, or one as JSON text: {call!r:.200}"
            )


def _are_arguments(value: Any) -> bool:
    """Whether arguments of a call are an object, text, or nothing. A map of Arrow is a list of pairs."""
    if isinstance(value, list):
        return all(isinstance(item, tuple) and len(item) == 2 for item in value)
    return value is None or isinstance(value, str | Mapping)


def _function_of(call: Any) -> Mapping[str, Any] | None:
    """The name and arguments of a call, which some data sets write without `function` around them."""
    if not isinstance(call, Mapping):
        return None
    function = call.get("function")
    if function is None and "name" in call:
        return call
    return function if isinstance(function, Mapping) else None


def _check_thoughts(message: Mapping[str, Any]) -> None:
    thoughts = {name: message[name] for name in THOUGHTS if message.get(name)}
    for name, value in thoughts.items():
        if not isinstance(value, str):
            raise ValueError(f"{name!r} is {type(value).__name__}; it must be text")
        try:
            _check_text(value)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
    if len(set(thoughts.values())) > 1:
        raise ValueError(f"{' and '.join(map(repr, thoughts))} differ; keep one of them")


def _check_text(text: str) -> None:
    """Check that a tokenizer can read text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} is the lone surrogate {text[error.start]!r}, half of a character that was cut in "
            "two; remove it, or write the whole character"
        ) from None


def check_prompt(value: Any, kinds: Sequence[str] = TEXT) -> None:
    """Check that `value` is text or a list of chat messages, and says something.

    Raises:
        ValueError: it is not; the text is a clause about the value.
    """
    if not isinstance(value, str):
        check_messages(value, kinds)
        if not _says_something(value):
            raise ValueError("no message has any text")
        return
    if not value.strip():
        raise ValueError("the text is empty")
    _check_text(value)
    if _MESSAGES_AS_TEXT.match(value):
        raise ValueError(_as_text_fault(value))
    check_no_conversation(value)


def check_no_conversation(text: str) -> None:
    """Refuse a text that is messages, of which the model would read the braces and quotes.

    That is a list of messages, one message, or an object with a list of them, also if it was written as text twice.

    Raises:
        ValueError: it is one; the text is a clause about the value.
    """
    value: Any = text
    for _ in range(2):
        if not isinstance(value, str) or not _JSON_AS_TEXT.match(value):
            break
        value = _parsed(value)
    if isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in _NAMES_OF_MESSAGES:
        (value,) = value.values()
    if _is_single_message(value) or (isinstance(value, list) and value and all(map(_is_message, value))):
        raise ValueError(_as_text_fault(text))


def _parsed(text: str) -> Any:
    """The value of JSON or of a literal of Python; None if it is neither."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and any(pair <= value.keys() for pair in _MESSAGE_FIELDS)


def _is_single_message(value: Any) -> bool:
    """Whether an object is a message, and no other record with such fields."""
    if not _is_message(value):
        return False
    role = value.get("role", value.get("from"))
    return isinstance(role, str) and role.lower() in (*ROLES, *_USUAL_ROLES)


def _as_text_fault(text: str) -> str:
    return f"it is a list of messages written as text ({text[:40]!r}...); write the list itself, as JSON or parquet"


def _says_something(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message has text, an image or a call."""
    for message in messages:
        content = joined_text(message.get("content"))
        if message.get("tool_calls") or (content.strip() if isinstance(content, str) else content):
            return True
    return False


def as_messages(
    value: str | Sequence[Mapping[str, Any]], system_prompt: str | None = None, *, has_padding: bool = False
) -> list[Message]:
    """Return a prompt as chat messages in normal form: text becomes a message of the user.

    Args:
        value: text, or messages that `check_messages` accepts.
        system_prompt: begins the conversation, unless that has a system message of its own.
        has_padding: see `normal_messages`.
    """
    if isinstance(value, str):
        messages: list[Message] = [{"role": "user", "content": value}]
    else:
        messages = normal_messages(value, has_padding=has_padding)
    if system_prompt and messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


def _check_content(content: Any, kinds: Sequence[str]) -> None:
    if content is None:
        return
    if isinstance(content, str):
        _check_text(content)
        return
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(f"'content' is {type(content).__name__}; it must be text or a list of parts")
    for part in content:
        if not isinstance(part, Mapping) or "type" not in part:
            raise ValueError("'content' is a list with a part that has no 'type'")
        if part["type"] not in kinds:
            supported = f"{' and '.join(kinds)} are" if len(kinds) > 1 else f"only {kinds[0]} is"
            raise ValueError(f"'content' has a part of type {part['type']!r}; {supported} supported")
        if part["type"] != "text":
            continue
        if not isinstance(part.get("text"), str):
            raise ValueError("'content' has a part of type 'text' without a text")
        _check_text(part["text"])


def normal_messages(value: Sequence[Mapping[str, Any]], *, has_padding: bool = False) -> list[Message]:
    """Return messages in one form, whatever file or client they come from.

    * Text in parts is joined, with a line break between two parts, since most templates take text alone. Beside images
      it stays in parts.
    * Arguments of calls are objects, not JSON text, encoded once or twice. Text that is no JSON object stays.
    * A call has its type, and `function` around its name and arguments. No text beside calls is an empty text.
    * The answer of a tool has the name of the tool.
    * A field without a value is left out.

    Args:
        value: messages that `check_messages` accepts.
        has_padding: the rows come from Arrow or Parquet, where each object has the fields of all others with nulls for
            those that it lacks. So nulls in arguments are no values there, and are left out.
    """
    names: dict[str, str] = {}
    waiting: list[str] = []  # names of the calls that no message has answered yet
    messages = []
    for message in value:
        normal = {name: item for name, item in message.items() if item is not None}
        normal["content"] = joined_text(message.get("content"))
        for field in THOUGHTS[1:]:
            if normal.get(field) and normal.get(THOUGHTS[0]) == normal[field]:
                del normal[field]
        calls = [_normal_call(call, has_padding) for call in normal.pop("tool_calls", ())]
        if calls:
            normal["tool_calls"] = calls
            waiting = [call["function"]["name"] for call in calls]
            names |= {str(call["id"]): call["function"]["name"] for call in calls if call.get("id")}
        if normal["role"] == "tool":
            next_name = waiting.pop(0) if waiting else None
            name: str | None = normal.get("name") or names.get(str(normal.get("tool_call_id"))) or next_name
            if name:
                normal["name"] = name
        messages.append(normal)
    return messages


def joined_text(content: Any) -> Any:
    """Text parts joined, because most templates take text only; with images, those that follow one another."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] != "text":
            parts.append({name: item for name, item in part.items() if item is not None})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += "\n" + part["text"]
        else:
            parts.append({"type": "text", "text": part["text"]})
    if any(part["type"] != "text" for part in parts):
        return parts
    return parts[0]["text"] if parts else ""


def _normal_call(call: Mapping[str, Any], has_padding: bool) -> dict[str, Any]:
    function = _function_of(call)
    assert function is not None
    outer = {} if function is call else {name: item for name, item in call.items() if item is not None}
    arguments = parsed_arguments(function.get("arguments"))
    if has_padding:
        arguments = without_padding(arguments)
    return {"type": "function", **outer, "function": {"name": function["name"], "arguments": arguments}}


def parsed_arguments(arguments: Any) -> Any:
    """The arguments of a call as an object, also where they were encoded twice; text that is none stays text.

    A text with NaN, or a number that is too large to be read, is none.
    """
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = finite_json(arguments, strict=False)
        value = finite_json(value, strict=False) if isinstance(value, str) else value
    except (ValueError, RecursionError, NoNumberError):
        return arguments
    return value if isinstance(value, dict) else arguments


def with_arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """The same messages with arguments of calls as JSON text, which some templates insist on."""
    converted = []
    for message in messages:
        calls = [
            call | {"function": call["function"] | {"arguments": as_text(call["function"]["arguments"])}}
            for call in message.get("tool_calls") or ()
        ]
        converted.append(message | {"tool_calls": calls} if calls else message)
    return converted


def as_text(arguments: Any) -> str:
    """Arguments of a call as JSON text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def without_padding(value: Any, keep: Set[tuple[str, ...]] = frozenset(), path: tuple[str, ...] = ()) -> Any:
    """Nested values of Arrow without the nulls of objects. Its maps, lists of pairs, are objects.

    Args:
        keep: fields whose nulls are values; lists add nothing to their paths.
        path: where the value is.
    """
    if isinstance(value, Mapping):
        return {
            name: without_padding(item, keep, (*path, name))
            for name, item in value.items()
            if item is not None or (*path, name) in keep
        }
    if isinstance(value, list) and value and all(isinstance(item, tuple) and len(item) == 2 for item in value):
        return {str(name): without_padding(item, keep, (*path, str(name))) for name, item in value}
    return [without_padding(item, keep, path) for item in value] if isinstance(value, list | tuple) else value


def with_answer(prompt: Sequence[Message], answer: str) -> list[Message]:
    """A prompt and its answer. One that ends with a turn of the assistant is continued by the answer."""
    if not prompt or prompt[-1]["role"] != "assistant":
        return [*prompt, {"role": "assistant", "content": answer}]
    return [*prompt[:-1], {"role": "assistant", "content": f"{prompt[-1].get('content') or ''}{answer}"}]


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], limit: int | None = None) -> list[list[int]]:
    """Return the token ids of rendered texts. No special tokens are added.

    Args:
        tokenizer: of the model.
        texts: what the template rendered.
        limit: of a text with more than twice as many tokens, only the first and the last `limit` tokens are returned.
            The rest is not tokenised, which takes minutes and gigabytes for a text of some megabytes.
    """
    return [ids for ids, _ in _encode(tokenizer, texts, limit, False)]


def encode_with_offsets(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], limit: int | None = None
) -> list[Tokens]:
    """`encode`, with the first and past-the-last character of each token. It needs a fast tokenizer."""
    return _encode(tokenizer, texts, limit, True)


def exceeds(tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> bool:
    """Whether the beginning of a text alone has more than twice `limit` tokens; False for texts that are not long.

    The first part that is tokenised has 64 characters per token of the limit, further ones four times as many.
    """
    size = first_part(limit)
    while size < len(text):
        if len(encode(tokenizer, [text[:size]])[0]) > 2 * limit:
            return True
        size *= 4
    return False


def first_part(limit: int) -> int:
    """Characters of a long text that are tokenised at first."""
    return _CHARACTERS * max(limit, _FEWEST)


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], limit: int | None, has_offsets: bool
) -> list[Tokens]:
    if limit is not None and (long := [number for number, text in enumerate(texts) if exceeds(tokenizer, text, limit)]):
        cut = {number: _ends(tokenizer, texts[number], limit, has_offsets) for number in long}
        rest = iter(_encode(tokenizer, [t for number, t in enumerate(texts) if number not in cut], None, has_offsets))
        return [cut[number] if number in cut else next(rest) for number in range(len(texts))]
    if not texts:
        return []
    encoded = tokenizer(
        list(texts),
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        **({"return_offsets_mapping": True} if has_offsets else {}),
    )
    rows: list[list[int]] = encoded["input_ids"]
    return list(zip(rows, encoded["offset_mapping"] if has_offsets else [[] for _ in rows], strict=True))


def _ends(tokenizer: PreTrainedTokenizerBase, text: str, limit: int, has_offsets: bool) -> Tokens:
    """The first and the last `limit` tokens of a text that `exceeds` the limit."""
    size, whole = first_part(limit), len(text)
    while True:
        start = whole - min(size, whole)
        (first, near), (last, far) = _encode(tokenizer, [text[:size], text[start:]], None, has_offsets)
        if size >= whole or min(len(first), len(last)) > limit:
            moved = [(begin + start, end + start) for begin, end in far[len(far) - limit :]]
            return [*first[:limit], *last[len(last) - limit :]], [*near[:limit], *moved]
        size *= 4
