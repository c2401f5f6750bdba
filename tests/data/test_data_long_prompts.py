"""Texts of megabytes are measured by their ends, and a text that is not much too long gives the same tokens as ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hybridrl.config.compose import load_config
from hybridrl.data import create_rl_dataset, create_sft_dataset
from hybridrl.data.chat import truncate
from hybridrl.errors import DataError
from hybridrl.models.chat import encode, exceeds
from hybridrl.models.tokenizer import load_tokenizer

WORDS = "the quick brown fox jumps over 12 lazy dogs, and again; "
LIMIT = 8


class Counting:
    """A tokenizer that counts the characters that it reads."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.read = tokenizer, 0

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.read += sum(map(len, texts))
        return self.tokenizer(texts, **options)


@pytest.mark.parametrize("text", [WORDS * 40_000, "x" * 2_000_000, "é漢" * 500_000, " " * 100_000 + WORDS * 20_000])
def test_a_long_text_is_read_at_its_ends_alone(text: str, micro_model: Path) -> None:
    counting = Counting(load_tokenizer(str(micro_model)))
    (ids,) = encode(counting, [text], LIMIT)
    assert len(ids) == 2 * LIMIT
    assert counting.read < len(text) / 2


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_what_truncation_leaves_is_that_of_the_whole_text(side: str, micro_model: Path) -> None:
    tokenizer = load_tokenizer(str(micro_model))
    text = "start " + WORDS * 2000 + "end"
    assert exceeds(tokenizer, text, LIMIT)
    short, whole = encode(tokenizer, ["a b", text, "c"], LIMIT), encode(tokenizer, ["a b", text, "c"])
    assert truncate(short[1], LIMIT, side) == truncate(whole[1], LIMIT, side)
    assert (short[0], short[2]) == (whole[0], whole[2])


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.text(max_size=200), max_size=4), limit=st.integers(1, 20))
def test_the_tokens_of_other_texts_stay(texts: list[str], limit: int, micro_model: Path) -> None:
    tokenizer = load_tokenizer(str(micro_model))
    for short, whole in zip(encode(tokenizer, texts, limit), encode(tokenizer, texts), strict=True):
        assert short == whole or (len(whole) > 2 * limit == len(short))


def test_data_sets_refuse_it(micro_model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(micro_model))
    file = tmp_path / "long.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": WORDS, "response": "yes"}, {"prompt": WORDS * 100_000, "response": "yes"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = [f"data.train_files={file}", "data.max_prompt_length=64", "data.max_response_length=8"]
    data = load_config("ppo_trainer", words).data
    with pytest.raises(DataError, match=r"the prompt has at least 128 tokens, more than data.max_prompt_length=64"):
        create_rl_dataset([str(file)], data, tokenizer, -1, "data.train_files")
    data = load_config("ppo_trainer", [*words, "data.filter_overlong_prompts=True"]).data
    assert len(create_rl_dataset([str(file)], data, tokenizer, -1, "data.train_files")) == 1
    keys = ["data.prompt_key=prompt", "data.response_key=response"]
    data = load_config("sft_trainer", [f"data.train_files={file}", "data.max_length=64", *keys]).data
    with pytest.raises(DataError, match=r"more than 128 tokens \(\d+ characters\), more than data.max_length=64"):
        create_sft_dataset([str(file)], data, tokenizer, -1, "data.train_files")
