"""Chat messages as text: one function for training, validation, serving and judges, which checks that no text is lost.

A chat template is a program that may leave out, rewrite or print as Python whatever it does not expect. So after each
rendering the text of each message is looked for, in the order of the messages. These changes are allowed:

* whitespace at both ends of a text is stripped, and `/think` and `/no_think` are taken out of a system message;
* a system message stands anywhere, and text beside calls may stand behind the answers to them;
* thoughts of the assistant (`reasoning_content`, or text before `</think>`) are dropped from every turn but the last;
* the answer of a tool is escaped as JSON, or is JSON that is written anew;
* the arguments of a call are JSON, or each name and each value stands by itself, escaped as JSON or not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hybridrl.errors import UserError
from hybridrl.models.chat import ROLES, THOUGHTS, Message, parsed_arguments, with_arguments_as_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: fields other than thoughts that hold what somebody said
_SAID = ("refusal", "function_call", "thinking_blocks", "reasoning_details", "audio", "tool_responses", "tool_results")
_COMMON = ("role", "content", "tool_calls", "tool_call_id", *THOUGHTS, *_SAID)
_SHORT = 16  # characters; shorter text may stand in a rendered conversation by chance
_SWITCHES = re.compile(r"/(?:no_)?think\b")
_SHAPES: dict[tuple[Any, ...], tuple[int, str] | None] = {}  # of conversations that were tried with marks -> the fault
_MAX_SHAPES = 1024

Piece = tuple[str, tuple[str, ...]]


class LostTextError(UserError):
    """A chat template leaves out what a message says.

    Attributes:
        turn: the number of the message.
        role: its role.
    """

    def __init__(self, turn: int, role: str, fault: str) -> None:
        super().__init__(f"message {turn} ({role}): {fault}")
        self.turn, self.role = turn, role


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, is_generated: bool = False, **arguments: Any
) -> str:
    """Return the text that the chat template makes of messages.

    Templates differ in what they take for calls: arguments as an object or as text, no text beside them as an empty
    text or as null. A few take text in parts alone. The first way in which no text is lost is used.

    Args:
        messages: in normal form (`hybridrl.models.chat.normal_messages`).
        is_generated: the assistant's turns were generated, and what the template leaves out of them is no error. What
            a model writes must not end a run, and a server's clients send thoughts to any template.
        arguments: further variables of the template, and `add_generation_prompt`.

    Raises:
        LostTextError: the template leaves out text of a message.
        Exception: what the template raises.
    """
    source = _source(tokenizer, arguments)
    failure: Exception | None = None  # of the way in which most of the conversation is written
    reached, incomplete = -2, None
    for variant in _variants(_for_template(source, messages), reads(source, "text")):
        text = None
        try:
            text = str(tokenizer.apply_chat_template(variant, tokenize=False, **arguments))
            _check(source, variant, text, not is_generated)
            if not is_generated:
                _check_no_text(variant, text)
            _check_short(tokenizer, source, variant, arguments)
        except Exception as error:  # a template is a program, and may fail in any way
            turn = error.turn if isinstance(error, LostTextError) else -1
            if turn > reached:
                failure, reached = error, turn
            if is_generated and isinstance(error, LostTextError) and error.role == "assistant":
                incomplete = incomplete or text
            continue
        return text
    if incomplete is not None:
        return incomplete
    assert failure is not None
    raise failure


def unread_fields(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the fields of messages that the chat template does not read. Those of text are refused by `rendered`."""
    source = _source(tokenizer, {})
    return {
        name
        for message in messages
        for name, value in message.items()
        if value is not None and name not in _COMMON and not (name == "name" and message.get("role") == "tool")
        if not (_reads_name(tokenizer, str(message.get("role"))) if name == "name" else reads(source, name))
    }


def unknown_roles(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the roles of messages that are none of the usual ones, and that the chat template does not name."""
    source = _source(tokenizer, {})
    roles = {str(message.get("role")) for message in messages}
    return {role for role in roles - set(ROLES) if not _names_role(source, role)}


def _names_role(source: str, role: str) -> bool:
    """Whether a template has a role as a text: beside the word `role` where it is the name of a field, too.

    "function" stands in each template with calls.
    """
    if role != "function":
        return reads(source, role)
    return re.search(r"role\b[^}%]*?['\"]function['\"]", source) is not None


def reads(source: str, field: str) -> bool:
    """Whether a template mentions a field of messages."""
    return field in _mentioned(source)


def reads_variable(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether the chat template mentions a variable, such as `tools`."""
    return re.search(rf"\b{re.escape(name)}\b", _source(tokenizer, {})) is not None


@lru_cache(maxsize=64)
def _mentioned(source: str) -> frozenset[str]:
    return frozenset(re.findall(r"""(?:\.|['"])([A-Za-z_]\w*)""", source))


def _reads_name(tokenizer: PreTrainedTokenizerBase, role: str) -> bool:
    mark = "qzxjqzxj"
    try:
        talk = [{"role": "user", "content": "?", "name": mark}]
        if role != "user":
            talk.append({"role": role, "content": "?", "name": mark})
            del talk[0]["name"]
        return mark in str(tokenizer.apply_chat_template(talk, tokenize=False))
    except Exception:  # what such a template reads cannot be told
        return reads(_source(tokenizer, {}), "name")


def _source(tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    template = arguments.get("chat_template") or getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)


def _for_template(source: str, messages: Sequence[Message]) -> list[Message]:
    """Messages with the role `system` for `developer`, and with thoughts under the name that the template reads."""
    own = next((name for name in THOUGHTS if reads(source, name)), None)
    result = []
    for message in messages:
        converted = dict(message)
        if converted.get("role") == "developer" and not reads(source, "developer"):
            converted["role"] = "system"
        for name in THOUGHTS:
            if converted.get(name) and own is not None and not reads(source, name) and own not in converted:
                converted[own] = converted.pop(name)
        result.append(converted)
    return result


def _variants(messages: list[Message], takes_parts: bool) -> Iterator[list[Message]]:
    yield messages
    if any(message.get("tool_calls") for message in messages):
        as_text = with_arguments_as_text(messages)
        yield as_text
        if any(message.get("tool_calls") and message.get("content") == "" for message in messages):
            for form in (messages, as_text):
                yield [m | {"content": None} if m.get("tool_calls") and m.get("content") == "" else m for m in form]
    if takes_parts:
        yield [
            m | {"content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else m
            for m in messages
        ]


# ------------------------------------------------------------------ the check


def _check(source: str, messages: Sequence[Message], text: str, keep_thoughts: bool) -> None:
    """Look for the text of each message in its order.

    The earliest place of each text is taken, so one that is not in the text after the earliest place of the message
    before is nowhere after that.
    """
    start = 0
    spoke = max((n for n, m in enumerate(messages) if m.get("role") == "assistant"), default=-1)
    if any(message.get("role") == "user" for message in messages[spoke:]):
        spoke = -1
    for turn, message in enumerate(messages):
        role, end = str(message.get("role")), start
        unread = [name for name in (*THOUGHTS, *_SAID) if message.get(name) and not reads(source, name)]
        if unread and keep_thoughts:
            raise LostTextError(turn, role, _unread_fault(unread[0]))
        if isinstance(message.get("content"), list) and str(message["content"]) in text:
            raise LostTextError(turn, role, "the chat template prints the list of its parts as Python does")
        for label, forms in _pieces(message, is_last=turn == spoke and keep_thoughts):
            is_free = role in ("system", "developer")
            begin = 0 if is_free else start
            is_beside_calls = bool(message.get("tool_calls")) and not label.startswith("the name")
            places = [(place, len(form)) for form in forms if (place := text.find(form, begin)) >= 0]
            if not places:
                raise LostTextError(turn, role, f"the chat template leaves out {label}")
            if not is_free and not is_beside_calls:
                place, length = min(places)
                end = max(end, place + length)
        for call in message.get("tool_calls") or ():
            _check_arguments(call["function"]["arguments"], text, start, turn, role)
        start = end


def _unread_fault(name: str) -> str:
    advice = f"write it into 'content', remove {name!r}, or take a template that reads it"
    if name in THOUGHTS:
        advice = f"write the thoughts into 'content' as <think>...</think>, remove {name!r}, or take a template with it"
    return f"the chat template does not read {name!r}, so its text would be lost; {advice}"


def _pieces(message: Message, is_last: bool) -> Iterator[Piece]:
    """Yield the texts that must stand in the rendered text, with the forms that they may have."""
    role, content = message.get("role"), message.get("content")
    texts = [content] if isinstance(content, str) else [part.get("text") for part in content or ()]
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            continue
        if role == "tool":
            yield f"its content {_brief(text)}", _escaped(text.strip()) + _as_json(text)
            continue
        if role == "system":
            yield f"its content {_brief(text)}", (text.strip(), _SWITCHES.sub("", text).strip())
            continue
        thought, mark, answer = text.rpartition("</think>") if role == "assistant" else ("", "", text)
        thought = thought.strip().removeprefix("<think>").strip()
        if mark and thought and is_last:
            yield f"its thoughts {_brief(thought)} (before </think>)", (thought,)
        if answer.strip():
            yield f"its content {_brief(answer)}", (answer.strip(),)
    for name in THOUGHTS:
        field = message.get(name)
        if isinstance(field, str) and field.strip() and is_last:
            yield f"{name!r} {_brief(field)}", (field.strip(),)
    for call in message.get("tool_calls") or ():
        yield f"the name of its call {call['function']['name']!r}", (call["function"]["name"],)


def _brief(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def _escaped(text: str) -> tuple[str, ...]:
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return (text,)
    return text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]


def _as_json(text: str) -> tuple[str, ...]:
    """JSON written anew."""
    if not text.lstrip().startswith(("{", "[")):
        return ()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    return tuple(
        json.dumps(value, ensure_ascii=is_ascii, indent=indent, separators=separators)
        for is_ascii in (False, True)
        for indent, separators in ((None, None), (None, (",", ":")), (2, None), (4, None))
    )


def _check_arguments(arguments: Any, text: str, start: int, turn: int, role: str) -> None:
    if isinstance(arguments, str):
        if arguments.strip() and text.find(arguments.strip(), start) < 0:
            raise LostTextError(turn, role, f"the chat template does not write its arguments {_brief(arguments)}")
        return
    if any(text.find(json.dumps(arguments, ensure_ascii=is_ascii), start) >= 0 for is_ascii in (False, True)):
        return
    for value in _objects(arguments):
        if text.find(str(value), start) >= 0 and text.find(json.dumps(value, ensure_ascii=False), start) < 0:
            raise LostTextError(turn, role, f"the chat template prints the arguments as Python does: {value!r:.80}")
    for value in _leaves(arguments):
        if not any(text.find(form, start) >= 0 for form in _leaf_forms(value)):
            raise LostTextError(turn, role, f"the chat template leaves out {value!r:.80} of its arguments")


def _check_no_text(messages: Sequence[Message], text: str) -> None:
    """Refuse arguments that are text and no JSON object, and that the template has encoded as a JSON text.

    A model would learn calls that no parser reads. A template that writes them as they are does what the data say.
    """
    for turn, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if not isinstance(arguments, str) or isinstance(parsed_arguments(arguments), dict):
                continue
            if any(json.dumps(arguments, ensure_ascii=is_ascii) in text for is_ascii in (False, True)):
                raise LostTextError(
                    turn,
                    str(message.get("role")),
                    f"the arguments of its call {name!r} are text that is no JSON object ({arguments[:60]!r}), and the "
                    "chat template writes them as a text; write an object",
                )


def _objects(value: Any) -> Iterator[Any]:
    """The arguments, and objects in them."""
    if isinstance(value, Mapping) and value:
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _objects(item)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _leaf_forms(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):  # the last two forms: calls as Python code
        text = value.strip()
        quoted = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
        return (*_escaped(text), repr(text)[1:-1], quoted)
    if value is None:
        return "null", "None", "none"
    return (json.dumps(value), str(value)) if isinstance(value, bool | int | float) else (str(value),)


def _check_short(tokenizer: Any, source: str, messages: Sequence[Message], arguments: Mapping[str, Any]) -> None:
    """Try a conversation with marks for its texts if one of them may be found where the template has not written it.

    That is a short text, and one of a system message that another message repeats.

    Conversations of one shape are tried once. A template that refuses marks is not checked in this way.
    """
    contents = [_plain_text(message.get("content")) for message in messages]
    if not any(_is_ambiguous(turn, messages, contents) for turn in range(len(messages))):
        return
    shape = tuple(
        (m.get("role"), type(m.get("content")), bool(text and text.strip()), len(m.get("tool_calls") or ()))
        for m, text in zip(messages, contents, strict=True)
    )
    others = {name: value for name, value in arguments.items() if name != "tools"}
    key = (source, shape, bool(arguments.get("tools")), repr(sorted(others.items())))
    if key not in _SHAPES:
        if len(_SHAPES) >= _MAX_SHAPES:
            return
        _SHAPES[key] = None
        marks = [f"qzxj{turn}qzxj" if has_text else None for turn, (_, _, has_text, _) in enumerate(shape)]
        marked = [
            message if mark is None else message | {"content": _with_text(message["content"], mark)}
            for message, mark in zip(messages, marks, strict=True)
        ]
        try:
            text = str(tokenizer.apply_chat_template(marked, tokenize=False, **arguments))
        except Exception:
            return
        missing = (turn for turn, mark in enumerate(marks) if mark is not None and mark not in text)
        _SHAPES[key] = next(((turn, str(messages[turn].get("role"))) for turn in missing), None)
    fault = _SHAPES[key]
    if fault is not None:
        turn, role = fault
        raise LostTextError(turn, role, f"the chat template leaves out its content {_brief(contents[turn] or '')}")


def _is_ambiguous(turn: int, messages: Sequence[Message], contents: Sequence[str | None]) -> bool:
    text = (contents[turn] or "").strip()
    if not text:
        return False
    is_free = messages[turn].get("role") in ("system", "developer")
    repeated = is_free and any(text in (other or "") for number, other in enumerate(contents) if number != turn)
    return len(text) < _SHORT or repeated


def _plain_text(content: Any) -> str | None:
    """The text of a message that has text alone."""
    if isinstance(content, list) and len(content) == 1 and content[0].get("type") == "text":
        content = content[0].get("text")
    return content if isinstance(content, str) else None


def _with_text(content: Any, text: str) -> Any:
    return text if isinstance(content, str) else [{"type": "text", "text": text}]
