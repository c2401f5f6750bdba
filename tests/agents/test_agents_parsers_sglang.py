"""SGLang's parsers of tool calls as `multi_turn.format`; `scripts/test.sh` runs this file in SGLang's environment."""

import pytest
from engine_parsers import WRITTEN, check, made

from hybridrl.chat.parsers.tool_parser import tool_parser_of
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.rollout import RolloutError

pytest.importorskip("sglang", reason="SGLang is not installed: bash scripts/install.sh cpu sglang")


NAMES = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "glm45": "glm45",
    "kimi_k2": "kimi_k2",
    "deepseek_v32": "deepseekv32",
}


@pytest.mark.parametrize("name", NAMES)
def test_calls_text_and_what_cannot_be_read(name, micro_model) -> None:
    write, damaged = WRITTEN[name]
    parser = made("sglang", NAMES[name], micro_model)
    check(parser, write, damaged, parser.tokenizer.eos_token)


def test_a_name_that_sglang_does_not_know(micro_model) -> None:
    with pytest.raises(RolloutError, match=r"sglang:hermess: SGLang has no such parser; it has .*hermes, "):
        tool_parser_of("hybridrl.chat.parsers.sglang:hermess", load_tokenizer(str(micro_model)))
