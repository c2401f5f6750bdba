"""What is checked of every parser that an engine brings: the same in vLLM's environment and in SGLang's."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from test_agents_parsers import ARGUMENTS, PARIS, WEATHER, coder, glm, hermes, kimi

from hybridrl.agents import FunctionCall, MalformedCall
from hybridrl.chat.parsers.tool_parser import ToolParser, tool_parser_of
from hybridrl.models.tokenizer import load_tokenizer

Calls = list[dict[str, Any]]


def deepseek_v32(calls: Calls) -> str:
    inner = "".join(
        '<｜DSML｜invoke name="weather">\n'
        + "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n"
            for key, value in call.items()
        )
        + "</｜DSML｜invoke>\n"
        for call in calls
    )
    return f"<｜DSML｜function_calls>\n{inner}</｜DSML｜function_calls>"


#: how formats write calls, and a call that cannot be read
WRITTEN: dict[str, tuple[Callable[[Calls], str], str]] = {
    "hermes": (hermes, '<tool_call>\n{"name": "weather", "argum'),
    "qwen3_coder": (coder, "<tool_call>\nweather(city=Paris)\n</tool_call>"),
    "glm45": (glm, "<tool_call>"),
    "kimi_k2": (kimi, "<|tool_calls_section_begin|><|tool_call_begin|>Paris<|tool_call_end|>"),
    "deepseek_v32": (deepseek_v32, "<｜DSML｜function_calls>\n<｜DSML｜invoke"),
}


def made(module: str, name: str, model: Path, tokens: tuple[str, ...] = ()) -> ToolParser:
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_tokens(list(tokens))
    parser = tool_parser_of(f"hybridrl.chat.parsers.{module}:{name}", tokenizer)
    return pickle.loads(pickle.dumps(parser))  # the server's process gets it like this


def check(parser: ToolParser, write: Callable[[Calls], str], damaged: str, end: str) -> None:
    for calls in ([ARGUMENTS], [PARIS, ARGUMENTS, {}]):
        parsed = parser.parse("<think>Hm</think>I look." + write(calls) + end, [WEATHER])
        assert [(call.name, call.arguments) for call in parsed.calls] == [("weather", one) for one in calls]
        assert parsed.content == "I look."
        twice = parser.parse("<think>Hm</think>I look." + write(calls) + end, [WEATHER])
        assert twice == parsed  # no made-up ids, nothing kept from the turn before
    for text in ("The answer is 4.", '{"answer": 4}', "a < b and {c}", ""):
        parsed = parser.parse(text + end, [WEATHER])
        assert (parsed.content, parsed.calls) == (text, [])
    malformed = parser.parse("So: " + damaged + end, [WEATHER]).calls
    assert malformed and all(isinstance(call, MalformedCall) or not call.arguments for call in malformed)
    ids = [
        call.tool_call_id for call in parser.parse(write([PARIS]), [WEATHER]).calls if isinstance(call, FunctionCall)
    ]
    assert ids in ([None], ["functions.weather:0"])
