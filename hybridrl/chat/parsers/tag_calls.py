"""Formats whose calls are tags: Qwen3-Coder (and Qwen3.5), GLM 4.5 and later."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.chat.parsers.tool_parser import (
    Call,
    FunctionCall,
    MalformedCall,
    Parsed,
    ToolParser,
    pieces,
    register_tool_parser,
    typed,
    without_thoughts,
)

_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]*)>(?P<body>.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=(?P<name>[^>\n]*)>(?P<value>.*?)(?:</parameter>|(?=<parameter=)|(?=</function>)|\Z)", re.DOTALL
)


@register_tool_parser("qwen3_coder")
class QwenCoderParser(ToolParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        content: list[str] = []
        calls: list[Call] = []
        for part, marked, _ in pieces(without_thoughts(text), "<tool_call>", "</tool_call>"):
            if marked:
                calls.append(self._call(part, tools))
            else:
                content.append(part)
        return Parsed("".join(content).strip(), calls)

    def opening(self, name: str | None) -> str:
        return "<tool_call>\n<function=" if name is None else f"<tool_call>\n<function={name}>\n"

    def _call(self, part: str, tools: Sequence[Mapping[str, Any]]) -> Call:
        function = _FUNCTION.match(part)
        name = function["name"].strip() if function else ""
        if function is None or not name:
            return MalformedCall(part, "it has no <function=NAME>...</function>")
        body, arguments = function["body"], {}
        for parameter in _PARAMETER.finditer(body):
            key = parameter["name"].strip()
            arguments[key] = typed(_inner(parameter["value"]), name, key, tools)
        rest = _PARAMETER.sub("", body)
        if rest.strip():
            return MalformedCall(part, f"{rest.strip()[:60]!r} stands outside of <parameter=NAME>...</parameter>")
        return FunctionCall(name, arguments)


@register_tool_parser("glm")
class GlmParser(ToolParser):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, of GLM 4.5 and later."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        content: list[str] = []
        calls: list[Call] = []
        for part, marked, _ in pieces(without_thoughts(text), "<tool_call>", "</tool_call>"):
            if marked:
                calls.append(self._call(part, tools))
            else:
                content.append(part)
        return Parsed(re.sub(r"<\|\w+\|>", "", "".join(content)).strip(), calls)

    def opening(self, name: str | None) -> str:
        return "<tool_call>" if name is None else f"<tool_call>{name}\n"

    def _call(self, part: str, tools: Sequence[Mapping[str, Any]]) -> Call:
        head, mark, rest = part.partition("<arg_key>")
        name = head.strip()
        if not name or re.search(r"[\s<>{}]", name):
            return MalformedCall(part, "the name of the function must follow <tool_call>")
        arguments: dict[str, Any] = {}
        for pair in rest.split("<arg_key>") if mark else ():
            key, closed, after = pair.partition("</arg_key>")
            between, opened, value = after.partition("<arg_value>")
            value, ended, more = value.partition("</arg_value>")
            if not (closed and opened and ended) or between.strip() or more.strip():
                return MalformedCall(part, "arguments are <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")
            arguments[key.strip()] = typed(value, name, key.strip(), tools)
        return FunctionCall(name, arguments)


def _inner(value: str) -> str:
    """A value without the line breaks next to its tags."""
    return value.removeprefix("\n").removesuffix("\n")
