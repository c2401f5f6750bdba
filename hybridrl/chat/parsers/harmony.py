"""OpenAI's harmony format, of gpt-oss."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.chat.parsers.tool_parser import (
    Call,
    MalformedCall,
    Parsed,
    ToolParser,
    register_tool_parser,
    with_arguments,
    without_ends,
)

_RECIPIENT = re.compile(r"\bto=(?P<name>[^\s<]+)")
_END = re.compile(r"<\|(?:end|call|return)\|>")


@register_tool_parser("gpt-oss")
class HarmonyParser(ToolParser):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.

    A message is a call if its header names a recipient `functions.NAME`, before or after the channel. Messages of the
    channel `analysis` are thoughts.
    """

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        content: list[str] = []
        calls: list[Call] = []
        for message in text.split("<|start|>"):
            header, mark, body = message.partition("<|message|>")
            body = _END.split(body, maxsplit=1)[0]
            recipient = _RECIPIENT.search(header)
            if recipient is not None and recipient["name"].startswith("functions."):
                name = recipient["name"].removeprefix("functions.")
                if not mark or not name:
                    calls.append(MalformedCall(message, "it is not to=functions.NAME ... <|message|>{...}"))
                else:
                    calls.append(with_arguments(name, body, message))
            elif recipient is not None:
                calls.append(MalformedCall(message, f"{recipient['name']} is not a tool; tools are functions.NAME"))
            elif "<|channel|>analysis" not in header:
                content.append(without_ends(body if mark else _END.sub("", header)))
        return Parsed("".join(content).strip(), calls)

    def opening(self, name: str | None) -> str:
        begun = "<|channel|>commentary to=functions."
        return begun if name is None else f"{begun}{name} <|constrain|>json<|message|>"
