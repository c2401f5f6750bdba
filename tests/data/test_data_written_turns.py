"""Texts that hold turns of their own are named: transcripts, and what a template has rendered before."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.config import DataConfig, GenerationDataConfig, PairsDataConfig, SFTDataConfig
from hybridrl.data import DataError, create_preference_dataset, create_rl_dataset, create_sft_dataset
from hybridrl.data.written_turns import written_form

RENDERED = {
    "hh": "\n\nHuman: What is 2+2?\n\nAssistant: 4\n\nHuman: And 3+3?\n\nAssistant:",
    "guanaco": "### Human: What is 2+2?\n### Assistant:",
    "vicuna": "USER: What is 2+2?\nASSISTANT:",
    "bold": "**User:** What is 2+2?\n\n**Assistant:**",
    "chatml": "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "llama 2": "<s>[INST] What is 2+2? [/INST]",
    "llama 3": "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2+2?<|eot_id|>",
    "llama 4": "<|header_start|>user<|header_end|>\n\nWhat is 2+2?<|eot|>",
    "gemma": "<start_of_turn>user\nWhat is 2+2?<end_of_turn>\n<start_of_turn>model\n",
    "harmony": "<|start|>user<|message|>What is 2+2?<|end|><|start|>assistant",
    "zephyr": "<|user|>\nWhat is 2+2?</s>\n<|assistant|>\n",
    "deepseek": "<\uff5cUser\uff5c>What is 2+2?<\uff5cAssistant\uff5c>",
    "alpaca": "### Instruction:\nWhat is 2+2?\n\n### Response:\n",
}
PLAIN = [
    "What is 2+2?",
    "Human: this is all that I say, without an answer.",
    "Describe the interface between Human: and Assistant: in one line.",
    "Note to the user: the assistant: is a role.",
    "Sort a[i] for i < 3 | j > 2; write [INST].",
    "### Instruction:\nJust a heading.",
    "In <user> tags, name the assistant: A or B?",
    "Q: 2+2?\nA: 4\nQ: 3+3?\nA:",
]


@pytest.mark.parametrize("name", RENDERED)
def test_each_form_is_recognised(name: str) -> None:
    assert written_form(RENDERED[name]) is not None


@pytest.mark.parametrize("text", PLAIN)
def test_other_texts_are_not(text: str) -> None:
    assert written_form(text) is None


@given(text=st.text(max_size=200))
def test_any_text_has_an_answer(text: str) -> None:
    assert written_form(text) is None or re.search(r"[:<\[]", text)


def rl(path: Any, tokenizer: Any) -> Any:
    return create_rl_dataset(path, DataConfig(prompt_key="question", max_prompt_length=300), tokenizer)


def lazily(path: Any, tokenizer: Any) -> Any:
    config = DataConfig(prompt_key="question", max_prompt_length=300, truncation="left")
    return create_rl_dataset(path, config, tokenizer)


def generation(path: Any, tokenizer: Any) -> Any:
    return create_rl_dataset(path, GenerationDataConfig(prompt_key="question", max_prompt_length=300), tokenizer)


def sft(path: Any, tokenizer: Any) -> Any:
    return create_sft_dataset(path, SFTDataConfig(prompt_key="question", response_key="a"), tokenizer)


def pairs(path: Any, tokenizer: Any) -> Any:
    config = PairsDataConfig(prompt_key="question", chosen_key="a", rejected_key="b")
    return create_preference_dataset(path, config, tokenizer)


@pytest.mark.parametrize("form", ["text", "messages"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("make", [rl, lazily, generation, sft, pairs])
def test_rows_of_each_program_are_counted_and_said_once(
    make: Callable[[Any, Any], Any], suffix: str, form: str, write: Any, tokenizer: Any, capsys: Any
) -> None:
    texts = [RENDERED["hh"], "plain", RENDERED["chatml"], RENDERED["hh"]]
    prompts: list[Any] = texts if form == "text" else [[{"role": "user", "content": text}] for text in texts]
    path = write(f"rows.{suffix}", [{"question": prompt, "a": "4", "b": "5"} for prompt in prompts])
    make(path, tokenizer)
    lines = [line for line in capsys.readouterr().err.splitlines() if "turns of" in line]
    assert len(lines) == 1
    for fact in ("'question'", "3 of 4 rows", "ChatML (1 rows)", "Human: ... Assistant: ... (2 rows)"):
        assert fact in lines[0]


def test_rows_with_messages_of_their_own_are_not(write: Any, tokenizer: Any, capsys: Any) -> None:
    rl(write("rows.jsonl", [{"question": text} for text in PLAIN]), tokenizer)
    assert "turns of" not in capsys.readouterr().err


def test_pairs_of_transcripts_without_a_prompt_are_refused_with_their_form(write: Any, tokenizer: Any) -> None:
    rows = [{"chosen": "\n\nHuman: hi\n\nAssistant: a", "rejected": "\n\nHuman: hi\n\nAssistant: b"}]
    with raises_with(DataError, "'chosen'", "Human: ... Assistant: ..."):
        create_preference_dataset(write("a.jsonl", rows), PairsDataConfig(), tokenizer)
