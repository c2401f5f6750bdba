"""Parsers of tool calls: on text as each model's template writes it, on damaged text, and on any text."""

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.agents import FunctionCall, MalformedCall, Parsed, register_tool_parser
from hybridrl.chat.parsers.tool_parser import tool_parser_of
from hybridrl.registry import TOOL_PARSERS

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": "boolean"},
                "places": {"type": "array", "items": {"type": "string"}},
                "zip": {"type": ["string", "null"]},
            },
        },
    },
}
ARGUMENTS = {"city": 'Zürich ("ZH")\nCH', "days": 3, "exact": True, "places": ["a", "b"], "zip": "08001"}
PARIS = {"city": "Paris"}


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def tagged(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def hermes(calls: list[dict]) -> str:
    return "".join(f'\n<tool_call>\n{{"name": "weather", "arguments": {dumped(c)}}}\n</tool_call>' for c in calls)


def coder(calls: list[dict]) -> str:
    inner = ["".join(f"<parameter={k}>\n{tagged(v)}\n</parameter>\n" for k, v in c.items()) for c in calls]
    return "".join(f"\n<tool_call>\n<function=weather>\n{one}</function>\n</tool_call>" for one in inner)


def glm(calls: list[dict]) -> str:
    inner = [
        "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{tagged(v)}</arg_value>\n" for k, v in c.items()) for c in calls
    ]
    return "".join(f"\n<tool_call>weather\n{one}</tool_call>" for one in inner)


def kimi(calls: list[dict]) -> str:
    inner = [
        f"<|tool_call_begin|>functions.weather:{n}<|tool_call_argument_begin|>{dumped(c)}<|tool_call_end|>"
        for n, c in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(inner)}<|tool_calls_section_end|>"


def deepseek_v3(calls: list[dict]) -> str:
    inner = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{dumped(c)}\n```<｜tool▁call▁end｜>"
        for c in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(inner) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: list[dict]) -> str:
    inner = [f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{dumped(c)}<｜tool▁call▁end｜>" for c in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(inner)}<｜tool▁calls▁end｜>"


def harmony(calls: list[dict]) -> str:
    start = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    return "<|end|>" + "<|call|>".join(f"{start}{dumped(c)}" for c in calls)


def llama(calls: list[dict]) -> str:
    return "; ".join(f'{{"name": "weather", "parameters": {dumped(c)}}}' for c in calls)


#: format, how it writes calls, text before them, end of the turn, whether the text before is content
WRITTEN = [
    ("hermes", hermes, "<think>\n<tool_call>no</tool_call>\n</think>\n\nI look.", "<|im_end|>", "I look."),
    ("qwen3_coder", coder, "I look.", "<|im_end|>", "I look."),
    ("glm", glm, "\n<think>Hm</think>\nI look.", "<|observation|>", "I look."),
    ("kimi", kimi, "I look.", "<|im_end|>", "I look."),
    ("deepseek", deepseek_v3, "I look.", "<｜end▁of▁sentence｜>", "I look."),
    ("deepseek", deepseek_v31, "<think>Hm</think>I look.", "<｜end▁of▁sentence｜>", "I look."),
    ("gpt-oss", harmony, "<|channel|>analysis<|message|>to=functions.no", "<|call|>", ""),
    ("llama3_json", llama, "", "<|eot_id|>", ""),
    ("llama3_json", llama, "<|python_tag|>", "<|eom_id|>", ""),
]
FORMATS = sorted({name for name, *_ in WRITTEN})


def parser(name: str):
    return TOOL_PARSERS.get(name)()


def test_every_format_is_tested() -> None:
    ours = {name for name in TOOL_PARSERS.names() if TOOL_PARSERS.get(name).__module__.startswith("hybridrl.")}
    assert ours == set(FORMATS)  # other tests of this process register their own


@pytest.mark.parametrize(("name", "write", "before", "end", "content"), WRITTEN)
@pytest.mark.parametrize("calls", [[ARGUMENTS], [PARIS, ARGUMENTS, {}]], ids=["one", "three"])
def test_calls_as_the_template_writes_them(name, write, before, end, content, calls) -> None:
    parsed = parser(name).parse(before + write(calls) + end, [WEATHER])
    assert [(call.name, call.arguments) for call in parsed.calls] == [("weather", one) for one in calls]
    assert parsed.content == content


def test_ids_that_the_model_gives_are_kept() -> None:
    calls = parser("kimi").parse(kimi([PARIS, PARIS])).calls
    assert [call.tool_call_id for call in calls] == ["functions.weather:0", "functions.weather:1"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["The answer is 4.", '{"answer": 4}', "", "a < b and {c}"])
def test_text_without_calls_is_content(name, text) -> None:
    parsed = parser(name).parse(text, [WEATHER])
    assert (parsed.content, parsed.calls) == (text, [])


DAMAGED = [
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Pa</tool_call>', "not JSON"),
    ("hermes", "<tool_call>[1, 2]</tool_call>", "not a JSON object"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', "arguments are not a JSON object"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
    ("hermes", '<tool_call>{"name": "weather", "argum<|im_end|>', "not JSON"),
    ("llama3_json", '{"name": "weather", "parameters": {"city": ', "not JSON"),
    ("llama3_json", '<|python_tag|>print("hello")', "not JSON"),
    ("llama3_json", '<|python_tag|>{"city": 3}', 'no "name"'),
    ("qwen3_coder", "<tool_call>\nweather(city=Paris)\n</tool_call>", "no <function=NAME>"),
    ("qwen3_coder", "<tool_call><function=weather>city=Paris</function></tool_call>", "outside"),
    ("glm", "<tool_call>{'name': 'weather'}</tool_call>", "name of the function"),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key></tool_call>", "<arg_value>"),
    ("kimi", '<|tool_call_begin|>{"city": "Paris"}<|tool_call_end|>', "functions.NAME"),
    ("kimi", "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>Paris<|tool_call_end|>", "not JSON"),
    (
        "kimi",
        "<|tool_call_begin|>functions.a<|im_end|>:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "functions.NAME",
    ),
    ("deepseek", "<｜tool▁call▁begin｜>weather(Paris)<｜tool▁call▁end｜>", "NAME"),
    ("deepseek", "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{'a'}<｜tool▁call▁end｜>", "not JSON"),
    ("gpt-oss", "<|channel|>commentary to=functions.weather<|message|>Paris<|call|>", "not JSON"),
    ("gpt-oss", "<|channel|>commentary to=functions.weather<|call|>", "functions.NAME"),
    ("gpt-oss", "<|channel|>commentary to=browser.search<|message|>{}<|call|>", "not a tool"),
]


@pytest.mark.parametrize(("name", "text", "reason"), DAMAGED)
def test_calls_that_cannot_be_read_are_reported_with_the_reason(name, text, reason) -> None:
    (call,) = parser(name).parse(text, [WEATHER]).calls
    assert isinstance(call, MalformedCall) and reason in call.reason


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_turn_that_ends_inside_of_a_complete_call_has_the_call(name) -> None:
    text = {one[0]: one[1] for one in WRITTEN}[name]([PARIS]).replace("\n</tool_call>", "<|im_end|>")
    assert parser(name).parse(text, [WEATHER]).calls == [FunctionCall("weather", PARIS)]


def test_values_of_tags_have_the_types_of_the_description() -> None:
    def read(key: str, text: str) -> Any:
        (call,) = parser("qwen3_coder").parse(coder([{key: text}]), [WEATHER]).calls
        return call.arguments[key]

    assert read("city", "5") == "5" and read("days", "5") == 5 and read("exact", "True") is True
    assert read("zip", "5") == "5" and read("zip", "null") is None and read("days", "five") == "five"
    assert read("places", '["5"]') == ["5"] and read("other", "5") == "5"


MARKS = [
    *("<tool_call>", "</tool_call>", "<function=weather>", "</function>", "<parameter=city>", "</parameter>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>", "weather", '{"name": "weather"'),
    *(
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "functions.weather:0",
        "<|python_tag|>",
    ),
    *(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "```json",
        "<|start|>",
        "<|message|>",
        "<|call|>",
    ),
    *(
        "<|channel|>commentary to=functions.weather",
        "{",
        "}",
        '"arguments": {}}',
        ";",
        "\n",
        "\ud800",
        "9" * 5000,
        "NaN",
    ),
]


@pytest.mark.parametrize("name", FORMATS)
@given(pieces=st.lists(st.sampled_from(MARKS) | st.text(max_size=8), max_size=12))
def test_no_text_breaks_a_parser_and_no_opened_call_vanishes(name, pieces) -> None:
    text = "".join(pieces)
    parsed = parser(name).parse(text, [WEATHER])
    assert all(isinstance(call, (FunctionCall, MalformedCall)) for call in parsed.calls)
    assert all(isinstance(call.arguments, dict) for call in parsed.calls if isinstance(call, FunctionCall))
    opening = {"kimi": "<|tool_call_begin|>", "deepseek": "<｜tool▁call▁begin｜>"}.get(name, "<tool_call>")
    if name not in ("gpt-oss", "llama3_json") and opening in text and "think>" not in text:
        assert parsed.calls


ENDS = {name: end for name, _, _, end, _ in WRITTEN}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["Which city?", "Which city?\n", "<think>Hm.</think>Which city?"])
def test_the_end_of_a_turn_is_no_content(name, text) -> None:
    """Simulated users, tools and judges read the content."""
    if "<think>" in text and name in ("gpt-oss", "llama3_json"):  # whose thoughts are written in another way
        return
    for end in {ENDS[name], "<|im_end|>", "<|endoftext|>", "<|im_end|>\n<|endoftext|>"}:
        parsed = parser(name).parse(text + end, [WEATHER])
        assert (parsed.content, parsed.calls) == ("Which city?", []), end


class Marks:
    """A tokenizer as far as parsers read it."""

    eos_token = "<|done|>"
    all_special_tokens = ("<|done|>", "<|pad|>", "<|im_end|>")
    added_tokens_decoder = None


@register_tool_parser("keeps_all")
class KeepsAll:
    """A user's parser that strips nothing."""

    def parse(self, text, tools=()):
        if text.startswith("call"):
            return Parsed(text, [FunctionCall("weather", {"city": text, "places": [{"a": text}]})])
        return Parsed(text, [MalformedCall(text, "no call")] if "?" not in text else [])


@pytest.mark.parametrize("name", [*FORMATS, "keeps_all"])
def test_no_special_token_of_the_model_is_read(name) -> None:
    made = tool_parser_of(name, Marks())
    assert made.parse("Which city?<|done|>", [WEATHER]).content == "Which city?"
    assert made.parse("Which<|pad|> city?<|done|><|pad|>", [WEATHER]).content == "Which city?"


def test_no_special_token_is_in_a_call() -> None:
    made = tool_parser_of("keeps_all", Marks())
    (call,) = made.parse("call Pa<|pad|>ris<|done|>").calls
    assert call.arguments == {"city": "call Paris", "places": [{"a": "call Paris"}]}
    (broken,) = made.parse("Pa<|pad|>ris<|done|>").calls
    assert broken.text == "Paris"
    (call,) = (
        tool_parser_of("qwen3_coder", Marks())
        .parse("<tool_call><function=weather><parameter=city>Pa<|pad|>ris<|done|>", [WEATHER])
        .calls
    )
    assert call.arguments == {"city": "Paris"}
    assert pickle.loads(pickle.dumps(made)).parse("x?<|done|>").content == "x?"
