"""`multi_turn.format=hybridrl.chat.parsers.sglang:NAME`: what SGLang's `--tool-call-parser NAME` reads."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.chat.parsers.engines import EngineParser
from hybridrl.chat.parsers.tool_parser import Call, with_arguments
from hybridrl.errors import RolloutError


@functools.cache
def __getattr__(name: str) -> type[EngineParser]:
    """The parser that SGLang registers as `name`.

    Raises:
        RolloutError: SGLang is not installed, or has no such parser.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
    except ImportError as error:
        raise RolloutError(f"multi_turn.format={__name__}:{name} needs SGLang, which is not here ({error})") from error
    parsers = FunctionCallParser.ToolCallParserEnum
    if name not in parsers:
        raise RolloutError(
            f"multi_turn.format={__name__}:{name}: SGLang has no such parser; it has {', '.join(sorted(parsers))}"
        )
    return type(name, (SglangParser,), {"name": f"{name} of SGLang", "parser": name, "__module__": __name__})


class SglangParser(EngineParser):
    """One of SGLang's parsers. A call to an unknown tool is malformed: SGLang does not return it."""

    parser: str

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call], set[str]]:
        content, tool_calls = self._new(tools).parse_non_stream(text)
        calls = [
            with_arguments(call.name or "", call.parameters, f"{call.name}({call.parameters})") for call in tool_calls
        ]
        return content, calls, set()

    def has_call(self, text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
        return bool(self._new(tools).has_tool_call(text))

    def _new(self, tools: Sequence[Mapping[str, Any]]) -> Any:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        return FunctionCallParser([Tool(**tool) for tool in tools], self.parser, self.tokenizer)
