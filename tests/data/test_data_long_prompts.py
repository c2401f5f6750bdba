"""Texts of megabytes are measured by their ends, and a text that is not much too long gives the same tokens as ever."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from raising import raises_with
from vision_tools import dataset_of, picture, png

from hybridrl.config import load_config
from hybridrl.config.schema.model import ModelConfig
from hybridrl.data import create_preference_dataset, create_rl_dataset, create_sft_dataset
from hybridrl.data.dataset_rendering import truncate
from hybridrl.data.preprocess.preprocessing import write_rows
from hybridrl.errors import DataError
from hybridrl.models.chat import encode, exceeds
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.models.vision import processor_of

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
    with raises_with(DataError, "128 tokens", "data.max_prompt_length=64"):
        create_rl_dataset([str(file)], data, tokenizer, -1, "data.train_files")
    data = load_config("ppo_trainer", [*words, "data.filter_overlong_prompts=True"]).data
    assert len(create_rl_dataset([str(file)], data, tokenizer, -1, "data.train_files")) == 1
    keys = ["data.prompt_key=prompt", "data.response_key=response"]
    data = load_config("sft_trainer", [f"data.train_files={file}", "data.max_length=64", *keys]).data
    with pytest.raises(DataError, match=r"more than 128 tokens \(\d+ characters\), more than data.max_length=64"):
        create_sft_dataset([str(file)], data, tokenizer, -1, "data.train_files")


class Counted(Counting):
    """A tokenizer of a data set that counts the characters that it reads."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def supervised(kind: str, rows: list[dict[str, Any]], model: Path, tmp_path: Path, **settings: Any) -> tuple[Any, int]:
    """A data set of conversations, and how many characters it tokenised."""
    file, tokenizer = tmp_path / f"{kind}.jsonl", Counted(load_tokenizer(str(model)))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    keys = ["data.prompt_key=prompt"] + ["data.response_key=response"] * (kind == "sft")
    words = [f"data.train_files={file}", *keys, *(f"data.{name}={value}" for name, value in settings.items())]
    make = create_sft_dataset if kind == "sft" else create_preference_dataset
    data = load_config(f"{kind}_trainer", [*words, "data.shuffle=False"]).data
    return make([str(file)], data, tokenizer, -1, "data.train_files"), tokenizer.read


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("where", ["prompt", "response"])
def test_fine_tuning_reads_the_ends_of_a_conversation_that_it_cuts(
    side: str, where: str, micro_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"prompt": "start? ", "response": "yes "}
    row[where] += WORDS * 600 + "end"
    rows = [row, {"prompt": "a", "response": "b"}]
    short, read = supervised("sft", rows, micro_model, tmp_path, max_length=16, truncation=side)
    assert read < len(row[where])
    monkeypatch.setattr("hybridrl.models.chat._FEWEST", 10**6)  # no text is long then
    whole, read = supervised("sft", rows, micro_model, tmp_path, max_length=16, truncation=side)
    assert read > len(row[where])
    assert all(short[n] == whole[n] for n in range(2))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("long", [("prompt",), ("chosen",), ("chosen", "rejected"), ("prompt", "rejected")])
def test_pairs_that_are_cut_are_those_of_the_whole_text(
    side: str, long: tuple[str, ...], micro_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"prompt": "start? ", "chosen": "yes, it is ", "rejected": "no "}
    row |= {name: row[name] + WORDS * 600 + "end" for name in long}
    settings = {"max_length": 24, "truncation": side}

    def made(number: int) -> tuple[Any, int]:
        try:
            pairs, read = supervised("dpo", [row, row], micro_model, tmp_path, **settings)
        except DataError as error:
            return re.sub(r"has (at least )?\d+ tokens", "", str(error)), 0
        return [pairs[n] for n in range(len(pairs))], read

    short, read = made(0)
    assert read < sum(len(row[name]) for name in long) * 2
    monkeypatch.setattr("hybridrl.models.chat._FEWEST", 10**6)
    assert made(1)[0] == short


@pytest.mark.parametrize("truncation", ["error", "left", "right"])
def test_long_pairs_that_are_not_cut_are_refused_or_left_out(
    truncation: str, micro_model: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": text, "chosen": "yes", "rejected": "no"} for text in ("a?", WORDS * 2000, "b?")]
    pairs, read = supervised(
        "dpo", rows, micro_model, tmp_path, max_length=64, truncation=truncation, filter_pairs=True
    )
    assert [pairs[n]["index"] for n in range(len(pairs))] == [0, 2]
    assert read < len(WORDS) * 1000
    if truncation == "error":
        with raises_with(DataError, "line 2", "128 tokens"):
            supervised("dpo", rows, micro_model, tmp_path, max_length=64)


@pytest.mark.parametrize("truncation", ["error", "left"])
def test_long_prompts_of_a_vision_model_are_measured_by_their_ends(
    truncation: str, vision_models: dict[str, Path], tmp_path: Path
) -> None:
    model = next(iter(vision_models.values()))
    text = "<image>" + WORDS * 2000 + "end"
    image = {"bytes": png(picture((16, 16), 0))}
    rows: list[dict[str, Any]] = [
        {"prompt": [{"role": "user", "content": "<image>What?"}], "images": [image]},
        {"prompt": [{"role": "user", "content": text}], "images": [image]},
        {"prompt": [{"role": "user", "content": WORDS * 2000 + "end"}], "images": []},
    ]
    write_rows(tmp_path / "rows.parquet", rows[:2])
    file = tmp_path / "rows.parquet"
    kept = dataset_of(file, model, max_prompt_length=50, filter_overlong_prompts=True, truncation=truncation)
    assert len(kept) == 1
    with pytest.raises(DataError, match=r"row 1 \(.*\): the prompt has at least 100 tokens"):
        dataset_of(file, model, max_prompt_length=50, truncation=truncation)
    write_rows(file, rows[::2])
    if truncation == "left":
        assert len(dataset_of(file, model, max_prompt_length=50, truncation=truncation)[1]["input_ids"]) == 50


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_long_conversations_with_images_are_refused(kind: str, vision_models: dict[str, Path], tmp_path: Path) -> None:
    model = next(iter(vision_models.values()))
    image = {"bytes": png(picture((16, 16), 0))}
    row = {"messages": [{"role": "user", "content": "<image>" + WORDS * 2000}], "images": [image]}
    turns = [[*row["messages"], {"role": "assistant", "content": text}] for text in ("yes", "no")]
    write_rows(tmp_path / "rows.parquet", [{**row, "messages": turns[0], "chosen": turns[0], "rejected": turns[1]}])
    words = [f"data.train_files={tmp_path}/rows.parquet", "data.max_length=64", "data.truncation=left"]
    data = load_config(f"{kind}_trainer", words).data
    make = create_sft_dataset if kind == "sft" else create_preference_dataset
    processor = processor_of(ModelConfig(path=str(model)), None)
    with pytest.raises(DataError, match=r"row 0 \(.*\): the .*conversation has (more than|at least) 128 tokens.*never"):
        make([str(tmp_path / "rows.parquet")], data, load_tokenizer(model), -1, "data.train_files", processor)
