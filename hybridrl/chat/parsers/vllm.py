"""`multi_turn.format=hybridrl.chat.parsers.vllm:NAME`: what `vllm serve --tool-call-parser NAME` reads."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.chat.parsers.engines import EngineParser
from hybridrl.chat.parsers.tool_parser import Call, with_arguments
from hybridrl.errors import RolloutError


@functools.cache
def __getattr__(name: str) -> type[EngineParser]:
    """The parser that vLLM registers as `name`.

    Raises:
        RolloutError: vLLM is not installed, or has no such parser.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise RolloutError(f"multi_turn.format={__name__}:{name} needs vLLM, which is not here ({error})") from error
    try:
        cls = ToolParserManager.get_tool_parser(name)
    except KeyError:
        registered = ", ".join(sorted(ToolParserManager.list_registered()))
        raise RolloutError(
            f"multi_turn.format={__name__}:{name}: vLLM has no such parser; it has {registered}"
        ) from None
    return type(name, (VllmParser,), {"name": f"{name} of vLLM", "cls": cls, "__module__": __name__})


class VllmParser(EngineParser):
    """One of vLLM's parsers."""

    cls: Any

    def use(self, tokenizer: Any) -> None:
        super().use(tokenizer)
        try:
            self.cls(self.tokenizer)
        except RuntimeError as error:
            raise RolloutError(
                f"multi_turn.format={__name__}:{type(self).__name__} does not fit the model's tokenizer: {error}"
            ) from error

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call], set[str]]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

        described = [ChatCompletionToolsParam(**tool) for tool in tools]
        body = {"messages": [], "model": "", "tools": described or None, "skip_special_tokens": False}
        request = ChatCompletionRequest.model_validate(body)
        parser = self.cls(self.tokenizer, described)
        extracted = parser.extract_tool_calls(text, request)
        marks = {
            value
            for key, value in vars(parser).items()
            if isinstance(value, str) and (key == "bot_token" or key.endswith("_start_token"))
        }
        calls = []
        for call in extracted.tool_calls:
            name, arguments = call.function.name, call.function.arguments
            id = call.id if call.id and call.id in text else None  # parsers make ids up where the model gives none
            calls.append(with_arguments(name, arguments, f"{name}({arguments})", id))
        return extracted.content or "", calls, marks
