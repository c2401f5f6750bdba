"""Formats whose calls are JSON between marks: Hermes (Qwen2.5, Qwen3), Llama 3, Kimi K2 and DeepSeek V3."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.chat.parsers.tool_parser import (
    Call,
    MalformedCall,
    Parsed,
    ToolParser,
    call_in,
    call_of,
    pieces,
    register_tool_parser,
    with_arguments,
    without_ends,
    without_thoughts,
)

_LLAMA_TAG = "<|python_tag|>"
_LLAMA_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_KIMI_HEAD = re.compile(r"\s*(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?\s*")
_FENCED = re.compile(r"(?P<name>[^\n]*)\n```json\n(?P<arguments>.*?)\n?```\s*", re.DOTALL)


@register_tool_parser("hermes")
class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes 2 Pro, Qwen2.5 and Qwen3."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        content: list[str] = []
        calls: list[Call] = []
        for part, marked, _ in pieces(without_thoughts(text), "<tool_call>", "</tool_call>"):
            if marked:  # the model may end its turn instead of closing the mark
                calls.append(call_of(_until_token(part).strip()))
            else:
                content.append(part)
        return Parsed("".join(content).strip(), calls)

    def opening(self, name: str | None) -> str:
        begun = '<tool_call>\n{"name":'
        return begun if name is None else f'{begun} {json.dumps(name)}, "arguments":'


@register_tool_parser("llama3_json")
class LlamaParser(ToolParser):
    """`{"name": ..., "parameters": {...}}` as the whole turn, of Llama 3.1 to 3.3; several are separated by `;`.

    JSON without a name is an answer and no call, unless `<|python_tag|>` precedes it.
    """

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        for end in _LLAMA_ENDS:
            text = text.replace(end, "")
        text = without_ends(text)
        content, tag, rest = text.partition(_LLAMA_TAG)
        if not tag:
            content, rest = "", text
        rest = rest.strip()
        if not tag and not rest.startswith("{"):
            return Parsed(text.strip())
        decoder, calls = json.JSONDecoder(strict=False), list[Call]()
        while rest:
            try:
                value, used = decoder.raw_decode(rest)
            except (ValueError, RecursionError) as error:
                if tag or '"name"' in rest:
                    calls.append(MalformedCall(rest, f"it is not JSON ({error})"))
                    break
                return Parsed(text.strip())
            call = call_in(value, rest[:used], ("parameters", "arguments"))
            if isinstance(call, MalformedCall) and not tag and not (isinstance(value, dict) and "name" in value):
                return Parsed(text.strip())
            calls.append(call)
            rest = rest[used:].lstrip(" \n;,")
        return Parsed(content.strip(), calls)

    def opening(self, name: str | None) -> str:
        return '{"name":' if name is None else f'{{"name": {json.dumps(name)}, "parameters":'


@register_tool_parser("kimi")
class KimiParser(ToolParser):
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, of Kimi K2."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        content: list[str] = []
        calls: list[Call] = []
        for part, marked, _ in pieces(without_thoughts(text), "<|tool_call_begin|>", "<|tool_call_end|>"):
            if not marked:
                content.append(part)
                continue
            head, mark, arguments = part.partition("<|tool_call_argument_begin|>")
            name = _KIMI_HEAD.fullmatch(head)
            if not mark or name is None:
                calls.append(MalformedCall(part, "it is not functions.NAME:NUMBER<|tool_call_argument_begin|>{...}"))
            else:
                calls.append(with_arguments(name["name"], _until_token(arguments), part, head.strip()))
        return Parsed(re.sub(r"<\|\w+\|>", "", "".join(content)).strip(), calls)

    def opening(self, name: str | None) -> str:
        begun = "<|tool_calls_section_begin|><|tool_call_begin|>functions."
        return begun if name is None else f"{begun}{name}:0<|tool_call_argument_begin|>"


@register_tool_parser("deepseek")
class DeepSeekParser(ToolParser):
    """`<｜tool▁call▁begin｜>...<｜tool▁call▁end｜>`, of DeepSeek V3, R1 and V3.1.

    V3 and R1 write `function<｜tool▁sep｜>NAME` and the arguments as a fenced block of JSON; V3.1 writes
    `NAME<｜tool▁sep｜>{...}`.
    """

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        content: list[str] = []
        calls: list[Call] = []
        for part, marked, _ in pieces(without_thoughts(text), "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
            if marked:
                calls.append(self._call(part))
            else:
                content.append(part)
        plain = "".join(content)
        for mark in ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>"):
            plain = plain.replace(mark, "")
        return Parsed(plain.strip(), calls)

    def _call(self, part: str) -> Call:
        head, mark, rest = part.partition("<｜tool▁sep｜>")
        fenced = _FENCED.match(rest)
        name = fenced["name"].strip() if fenced else head.strip()
        if not mark or not name:
            return MalformedCall(part, "it is not NAME<｜tool▁sep｜>{...}")
        return with_arguments(name, fenced["arguments"] if fenced else rest.partition("<｜")[0], part)


def _until_token(text: str) -> str:
    """The text before the next special token of the form `<|...|>`."""
    return text.partition("<|")[0]
