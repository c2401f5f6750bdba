"""Labelled answers: forms of their rows, bad rows by name, truncation, and prompts with answers to other prompts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises_with

from hybridrl.config import LabelledDataConfig
from hybridrl.config.schema.data import MixtureConfig
from hybridrl.data import DataError, create_labelled_dataset, create_labelled_loader
from hybridrl.data.loader import LabelledCollator
from hybridrl.protocol import DataProto
from hybridrl.trainer.supervised.objective_rows import Totals, as_responses, mismatched

PROMPT = [{"role": "user", "content": "Sort: 21"}]
ROW = {"prompt": "Sort: 21", "completion": "12", "label": True}
HEAD = "<|im_start|>user\nSort: 21<|im_end|>\n<|im_start|>assistant\n"


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def make(path: Any, tokenizer: Any, **settings: Any) -> Any:
    return create_labelled_dataset(path, LabelledDataConfig(shuffle=False, **settings), tokenizer)


def learned(tokenizer: Any, row: dict[str, Any]) -> tuple[str, str, bool]:
    """What stands before the answer, the answer, and its label."""
    ids, mask = row["input_ids"], row["loss_mask"]
    own = [token for token, inside in zip(ids, mask, strict=True) if inside]
    return tokenizer.decode(ids[: mask.index(1)]), tokenizer.decode(own), row["desirable"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    "row",
    [
        ROW,
        {"prompt": PROMPT, "completion": answer("12"), "label": True},
        {"completion": [*PROMPT, *answer("12")], "label": True},
        {**ROW, "chosen": "not", "rejected": "read"},
    ],
)
def test_every_form_is_the_same_answer(name: str, row: dict[str, Any], write: Any, tokenizer: Any) -> None:
    (item,) = make(write(name, [row]), tokenizer)
    assert learned(tokenizer, item) == (HEAD, "12<|im_end|>", True)


def test_pairs_become_two_answers(write: Any, tokenizer: Any, capsys: Any) -> None:
    first = {"prompt": "Sort: 21", "chosen": "12", "rejected": "21"}
    rows = [first, {"prompt": "Sort: 3", "chosen": "3", "rejected": "4"}]
    dataset = make(write("a.jsonl", rows), tokenizer)
    assert [learned(tokenizer, item)[1:] for item in dataset] == [
        ("12<|im_end|>", True),
        ("3<|im_end|>", True),
        ("21<|im_end|>", False),
        ("4<|im_end|>", False),
    ]
    assert [item["index"] for item in dataset] == [0, 2, 1, 3] and dataset.locate(3).endswith("line 2")
    assert "2 desirable and 2 undesirable" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"prompt": "Sort: 21", "completion": "12"}, ["'label'", "data.label_key"]),
        ({"prompt": "Sort: 21", "label": True}, ["'completion'", "data.completion_key"]),
        ({"completion": "12", "label": True}, ["'prompt'", "data.prompt_key"]),
        ({**ROW, "label": 1}, ["'label'", "data.label_key", "1"]),
        ({**ROW, "label": "1"}, ["'label'", "'1'"]),
        ({**ROW, "label": "desirable"}, ["'label'", "'desirable'"]),
        ({**ROW, "label": None}, ["'label'", "None"]),
        ({**ROW, "completion": None}, ["'completion'"]),
        ({**ROW, "completion": " \n"}, ["'completion'", "data.filter_rows=True"]),
        ({**ROW, "completion": [{**answer("12")[0], "weight": 0.5}]}, ["'completion'", "weight"]),
        ({**ROW, "images": ["a.png"]}, ["'images'"]),
    ],
)
def test_a_bad_row_is_refused_by_name(row: dict[str, Any], facts: list[str], write: Any, tokenizer: Any) -> None:
    with raises_with(DataError, *facts):
        make(write("a.jsonl", [row]), tokenizer)


def test_unusable_rows_are_left_out_and_counted(write: Any, tokenizer: Any, capsys: Any) -> None:
    rows = [ROW, {**ROW, "completion": ""}, {**ROW, "completion": "1" * 80}, {**ROW, "label": False, "completion": "2"}]
    path = write("a.jsonl", rows)
    dataset = make(path, tokenizer, filter_rows=True, max_length=60)
    assert [(item["index"], item["desirable"]) for item in dataset] == [(0, True), (3, False)]
    assert "of 4 answers 2 were left out: 1 with an empty answer, 1 with too many tokens" in capsys.readouterr().err
    with raises_with(DataError, "data.train_files", "no answer is left of 1"):
        make(write("b.jsonl", rows[1:2]), tokenizer, filter_rows=True)
    with raises_with(DataError, "data.max_length=60"):
        make(write("c.jsonl", [rows[2]]), tokenizer, max_length=60)


def test_long_rows_are_cut_as_truncation_says(write: Any, tokenizer: Any) -> None:
    path = write("a.jsonl", [{**ROW, "prompt": "Sort: " + "7" * 40, "completion": "98765"}])
    (whole,) = make(path, tokenizer)
    longest = len(whole["input_ids"])
    (right,) = make(path, tokenizer, max_length=longest - 3, truncation="right")
    assert right["input_ids"] == whole["input_ids"][:-3]
    (left,) = make(path, tokenizer, max_length=longest - 3, truncation="left")
    assert (left["input_ids"], left["loss_mask"]) == (whole["input_ids"][3:], whole["loss_mask"][3:])


def test_labels_that_say_nothing_or_contradict_are_told(write: Any, tokenizer: Any, capsys: Any) -> None:
    make(write("a.jsonl", [ROW, {**ROW, "completion": "21"}]), tokenizer)
    assert "all 2 answers are desirable" in capsys.readouterr().err
    trims = copy.deepcopy(tokenizer)  # so that two texts are the same tokens
    trims.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    make(write("b.jsonl", [ROW, {**ROW, "completion": " 12 ", "label": False}]), trims)
    told = capsys.readouterr().err
    assert "1 prompts have an answer that is labelled both" in told and "all 2" not in told
    make(write("c.jsonl", [ROW, ROW, {**ROW, "completion": "21", "label": False}]), tokenizer)
    assert "warning" not in capsys.readouterr().err


def test_words_of_a_csv_file_are_labels(tmp_path: Path, tokenizer: Any) -> None:
    """Such a file has no booleans. pandas writes True, spreadsheets TRUE."""
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion,label\nSort: 21,12,True\nSort: 21,21,FALSE\nSort: 31,13, true\n")
    dataset = make(path, tokenizer)
    assert [dataset[item]["desirable"] for item in range(3)] == [True, False, True]


def test_batches_hold_labels(write: Any, tokenizer: Any) -> None:
    rows = [{**ROW, "completion": "1" * n, "label": n % 2 == 0} for n in range(1, 5)]
    config = LabelledDataConfig(seed=5)
    (batch,) = create_labelled_loader(config, create_labelled_dataset(write("a.jsonl", rows), config, tokenizer), 4)
    numbers = [int(number) for number in batch.non_tensor_batch["index"]]
    assert sorted(numbers) == [0, 1, 2, 3] != numbers
    inputs = as_responses(batch)
    assert inputs.batch["desirable"].tolist() == [number % 2 == 1 for number in numbers]
    assert Totals.of(inputs).sequences == 4
    with raises_with(DataError, "'desirable'", "LabelledDataset"):
        LabelledCollator(0)([{"input_ids": [1], "loss_mask": [1], "index": 0}])


def loaded(rows: list[tuple[list[int], list[int], int]]) -> DataProto:
    """A loader's batch of prompts with answers, and so many tokens after the answer that nothing learns from."""
    width = max(len(prompt) + len(own) + after for prompt, own, after in rows)
    ids, attention, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    for number, (prompt, own, after) in enumerate(rows):
        sequence = [*prompt, *own, *[9] * after]
        ids[number, : len(sequence)] = torch.tensor(sequence)
        attention[number, : len(sequence)] = 1
        mask[number, len(prompt) : len(prompt) + len(own)] = 1
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    tensors = {"input_ids": ids, "attention_mask": attention, "position_ids": positions, "loss_mask": mask}
    return DataProto.from_dict(tensors=tensors)


def read(batch: DataProto | None) -> list[tuple[list[int], list[int]]]:
    """The prompt and the answer of each row."""
    assert batch is not None
    columns, rows = [batch.batch[name].tolist() for name in ("input_ids", "attention_mask", "response_mask")], []
    for ids, attention, mask in zip(*columns, strict=True):
        length = sum(attention)
        assert attention == [1] * length + [0] * (len(ids) - length)
        first = 1 + mask.index(1)
        assert mask == [int(first - 1 <= at < length - 1) for at in range(len(mask))]
        rows.append((ids[:first], ids[first:length]))
    return rows


def test_prompts_get_the_answer_before_them_to_another_prompt() -> None:
    rows = [([1, 2], [5], 1), ([1, 2], [6, 6], 0), ([3], [7, 7, 7], 2)]
    assert read(mismatched(loaded(rows), 8, 0)) == [([1, 2], [7, 7, 7]), ([1, 2], [7, 7, 7]), ([3], [6, 6])]
    # Padding and what follows an answer change nothing; a prompt loses its beginning, never the answer its end.
    assert read(mismatched(loaded([*rows[:2], ([3], [7, 7, 7], 6)]), 8, 0)) == read(mismatched(loaded(rows), 8, 0))
    assert read(mismatched(loaded(rows), 4, 0)) == [([2], [7, 7, 7]), ([2], [7, 7, 7]), ([3], [6, 6])]
    assert read(mismatched(loaded([([1], [5], 0), ([1], [6], 0)]), 8, 0)) == [([1], [6]), ([1], [5])]  # one prompt
    assert mismatched(loaded(rows[:1]), 8, 0) is None


def test_a_mixture_knows_the_sources_of_both_answers_of_a_pair(write: Any, tokenizer: Any) -> None:
    rows = [
        {"prompt": "Sort: 21", "chosen": "12", "rejected": "21", "data_source": source}
        for source in ("a", "a", "a", "b", "b", "b")
    ]
    config = LabelledDataConfig(shuffle=True, mixture=MixtureConfig(weights={"a": 1, "b": 3}))
    dataset = create_labelled_dataset(write("a.jsonl", rows), config, tokenizer)
    loader = create_labelled_loader(config, dataset, 4)
    batch = next(iter(loader))
    sources = [rows[index // 2]["data_source"] for index in batch.non_tensor_batch["index"]]
    assert sorted(sources) == ["a", "b", "b", "b"]
    metrics = loader.sampler.metrics(batch)
    assert (metrics["data/mixture/a/share"], metrics["data/mixture/b/share"]) == (0.25, 0.75)
