"""The interface of parsers of tool calls, and the code that all of them share.

A parser never raises, whatever the model wrote: what looks like a call and cannot be read is returned as malformed.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hybridrl.registry import TOOL_PARSERS
from hybridrl.utils.end_tokens import without_ends
from hybridrl.utils.entry_metadata import EntryMetadata

T = TypeVar("T", bound="type[ToolParser]")

#: special tokens that are part of a call
ABOUT_CALLS = re.compile(r"tool|call|function|arg_|think", re.IGNORECASE)


@dataclass(frozen=True)
class FunctionCall:
    """A call that the model made.

    Attributes:
        name: of the tool.
        arguments: by name.
        tool_call_id: the id that the model gave; None in formats without ids.
    """

    name: str
    arguments: Mapping[str, Any]
    tool_call_id: str | None = None


@dataclass(frozen=True)
class MalformedCall:
    """Text that is marked as a call and cannot be read.

    Attributes:
        text: what the model wrote.
        reason: why it is not a call, for the model.
    """

    text: str
    reason: str


Call = FunctionCall | MalformedCall


@dataclass(frozen=True)
class Parsed:
    """One turn of the model.

    Attributes:
        content: the text without thoughts and calls.
        calls: what looks like calls, in their order.
    """

    content: str
    calls: list[Call] = field(default_factory=list)


class ToolParser(ABC):
    """Finds the tool calls in the text of one turn. Derive from it, and register it with `register_tool_parser`."""

    def use(self, tokenizer: Any) -> None:  # noqa: B027 - for parsers that need it
        """Take the model's tokenizer, before the first turn.

        Raises:
            RolloutError: the parser cannot work with it.
        """

    @abstractmethod
    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        """The calls in a turn.

        Args:
            text: all that the model generated, special tokens included.
            tools: the descriptions of the session's tools; formats without types read values by them.
        """

    def opening(self, name: str | None) -> str | None:
        """The text that begins a call, for turns that have to be one; None where the format has no single one.

        Args:
            name: of the function; None: the model chooses it.
        """
        return None


class _Readable(ToolParser):
    """A parser whose turns hold no special token: users, tools and programs read what it returns.

    Args:
        own: the parser; a class of the user's own may have `parse` and no more.
        tokenizer: of the model, which says what is a special token.
    """

    def __init__(self, own: Any, tokenizer: Any) -> None:
        self.own = own
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
        special = {*tokenizer.all_special_tokens, *(str(token) for token in added.values() if token.special)} - {""}
        self._ends = [token for token in special if token == tokenizer.eos_token or not ABOUT_CALLS.search(token)]
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        while end := next((token for token in self._ends if text.endswith(token)), None):
            text = text.removesuffix(end)
        parsed: Parsed = self.own.parse(text, tools)
        content = self._special.sub("", parsed.content)
        return Parsed(content if content == parsed.content else content.strip(), [self._call(c) for c in parsed.calls])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "own":  # also while it is unpickled and has no parser yet
            raise AttributeError(name)
        return getattr(self.own, name)

    def opening(self, name: str | None) -> str | None:
        return self.own.opening(name) if isinstance(self.own, ToolParser) else None

    def _call(self, call: Call) -> Call:
        if isinstance(call, MalformedCall):
            return replace(call, text=self._special.sub("", call.text))
        return replace(call, arguments=self._plain(call.arguments))

    def _plain(self, value: Any) -> Any:
        """A value of a call without special tokens in its texts."""
        if isinstance(value, str):
            return self._special.sub("", value)
        if isinstance(value, Mapping):
            return {self._plain(key): self._plain(entry) for key, entry in value.items()}
        return [self._plain(entry) for entry in value] if isinstance(value, list) else value


def register_tool_parser(name: str) -> Callable[[T], T]:
    """Class decorator: `multi_turn.format=NAME` is this parser."""

    def add(parser: T) -> T:
        TOOL_PARSERS.add(name, parser, EntryMetadata())
        return parser

    return add


def tool_parser_of(name: str, tokenizer: Any) -> ToolParser:
    """The parser of `multi_turn.format`, for a model's tokenizer."""
    parser = TOOL_PARSERS.get(name)()
    if isinstance(parser, ToolParser):
        parser.use(tokenizer)
    return _Readable(parser, tokenizer)


def pieces(text: str, begin: str, end: str) -> Iterator[tuple[str, bool, bool]]:
    """The parts of a text as (part, whether it stood between the marks, whether it was closed), in order."""
    place = 0
    while (first := text.find(begin, place)) >= 0:
        yield text[place:first], False, True
        inner = first + len(begin)
        last = text.find(end, inner)
        if last < 0:
            yield text[inner:], True, False
            place = len(text)
        else:
            yield text[inner:last], True, True
            place = last + len(end)
    yield text[place:], False, True


def without_thoughts(text: str) -> str:
    """The text after the last thought, in which no call is made, and without tokens that end the turn."""
    text = without_ends(text)
    _, closed, after = text.rpartition("</think>")
    if closed:
        return after
    return text.partition("<think>")[0]


def call_of(text: str, names: Sequence[str] = ("arguments", "parameters")) -> Call:
    """The call in a JSON object `{"name": ..., "arguments": {...}}`."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        return MalformedCall(text, f"it is not JSON ({error})")
    return call_in(value, text, names)


def call_in(value: Any, text: str, names: Sequence[str] = ("arguments", "parameters")) -> Call:
    """The call in a JSON value."""
    if not isinstance(value, dict):
        return MalformedCall(text, "it is not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall(text, 'it has no "name"')
    arguments = next((value[key] for key in names if key in value), None)
    return with_arguments(name, arguments, text)


def with_arguments(name: str, arguments: Any, text: str, tool_call_id: str | None = None) -> Call:
    """A call whose arguments are an object, or the text of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return MalformedCall(text, f"its arguments are not JSON ({error})")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return MalformedCall(text, "its arguments are not a JSON object")
    return FunctionCall(name, arguments, tool_call_id)


def typed(value: str, name: str, parameter: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    """A value that a format wrote as text, by the parameter's type in the tool's description."""
    described: Iterator[Mapping[str, Any]] = (tool["function"] for tool in tools if tool["function"]["name"] == name)
    function = next(described, None)
    types = _types(function["parameters"].get("properties", {}).get(parameter)) if function is not None else set()
    if types <= {"string"}:
        return value
    try:
        parsed = json.loads(value, strict=False)
    except (ValueError, RecursionError):
        parsed = {"true": True, "false": False, "none": None}.get(value.strip().lower(), value)
    if "string" in types and not _json_types(parsed) & types:
        return value
    return parsed


def _json_types(value: Any) -> set[str]:
    """The JSON types that a value is of."""
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    types_of: dict[type, set[str]] = {
        int: {"integer", "number"},
        float: {"number"},
        str: {"string"},
        dict: {"object"},
        list: {"array"},
    }
    return types_of[type(value)]


def _types(schema: Any) -> set[str]:
    """The JSON types that a parameter may have."""
    if not isinstance(schema, Mapping):
        return set()
    own = schema.get("type")
    types = {own} if isinstance(own, str) else {name for name in own or () if isinstance(name, str)}
    for option in schema.get("anyOf") or ():
        types |= _types(option)
    return types
