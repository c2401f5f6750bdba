"""Pairs of answers: forms of their columns, bad rows by name, truncation; weights, tools and thinking of turns."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from raising import raises_with

from hybridrl.config import PairsDataConfig, SFTDataConfig
from hybridrl.data import (
    DataError,
    create_pair_loader,
    create_preference_dataset,
    create_sft_dataset,
    create_sft_loader,
)
from hybridrl.trainer.supervised.objective_rows import Totals, as_responses, as_scored, normalise

PROMPT = [{"role": "user", "content": "Sort: 21"}]
ROW = {"prompt": "Sort: 21", "chosen": "12", "rejected": "21"}


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def make(path: Any, tokenizer: Any, **settings: Any) -> Any:
    return create_preference_dataset(path, PairsDataConfig(shuffle=False, **settings), tokenizer)


def shown(tokenizer: Any, side: dict[str, list[int]]) -> tuple[str, str]:
    """What stands before the first token that is learned, and what is learned."""
    ids, mask = side["input_ids"], side["loss_mask"]
    learned = [token for token, kept in zip(ids, mask, strict=True) if kept]
    return tokenizer.decode(ids[: mask.index(1)]), tokenizer.decode(learned)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    "row",
    [
        ROW,
        {**ROW, "prompt": PROMPT},
        {"prompt": PROMPT, "chosen": answer("12"), "rejected": answer("21")},
        {"chosen": [*PROMPT, *answer("12")], "rejected": [*PROMPT, *answer("21")]},
        {"prompt": "not read", "chosen": [*PROMPT, *answer("12")], "rejected": [*PROMPT, *answer("21")]},
    ],
)
def test_every_form_is_the_same_pair(name: str, row: dict[str, Any], write: Any, tokenizer: Any) -> None:
    (pair,) = make(write(name, [row]), tokenizer)
    prompt = "<|im_start|>user\nSort: 21<|im_end|>\n<|im_start|>assistant\n"
    assert shown(tokenizer, pair["chosen"]) == (prompt, "12<|im_end|>")
    assert shown(tokenizer, pair["rejected"]) == (prompt, "21<|im_end|>")
    assert tokenizer.decode(pair["chosen"]["input_ids"]) == f"{prompt}12<|im_end|>\n"  # where a reward is read


def test_earlier_turns_are_read_and_not_learned(write: Any, tokenizer: Any) -> None:
    talk = [*PROMPT, *answer("12"), {"role": "user", "content": "Again"}]
    row = {"prompt": talk, "chosen": "12", "rejected": "21"}
    (pair,) = make(write("a.jsonl", [row]), tokenizer, system_prompt="Be brief.")
    prompt, learned = shown(tokenizer, pair["chosen"])
    assert learned == "12<|im_end|>" and "Be brief." in prompt and prompt.count("12<|im_end|>") == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "Sort: 21", "chosen": "12"}, "no column 'rejected'.*data.rejected_key"),
        ({"chosen": "12", "rejected": "21"}, "no column 'prompt'.*holds answers alone"),
        ({**ROW, "chosen": None}, "column 'chosen' has no answer"),
        ({**ROW, "rejected": ""}, "the answer in column 'rejected' is empty.*data.filter_pairs"),
        ({**ROW, "rejected": "  \n"}, "'rejected' is empty"),
        ({**ROW, "rejected": "12"}, "the same answer"),
        ({**ROW, "prompt": ""}, "column 'prompt' cannot be used as a prompt: the text is empty"),
        ({**ROW, "prompt": [*PROMPT, *answer("x")]}, "the answer would follow it"),
        ({**ROW, "chosen": [*PROMPT]}, "its last message is of the role 'user'"),
        ({**ROW, "chosen": answer("1") + answer("2")}, "2 messages that begin with one of the assistant"),
        (
            {"chosen": [*PROMPT, *answer("12")], "rejected": [{"role": "user", "content": "No"}, *answer("21")]},
            "do not answer one prompt: the conversations differ from message 0 on",
        ),
        (
            {"chosen": [*PROMPT, *answer("12")], "rejected": [*PROMPT, *answer("1"), *PROMPT, *answer("21")]},
            "differ from message 1 on, and have 2 and 4 messages",
        ),
        ({**ROW, "chosen": [{**answer("12")[0], "weight": 0.5}]}, "column 'chosen' has train or weight"),
        ({**ROW, "rejected": [{**answer("21")[0], "train": False}]}, "column 'rejected' has train or weight"),
        ({**ROW, "images": ["a.png"]}, "column 'images' holds media"),
        ({**ROW, "margin": "far"}, "column 'margin' .data.margin_key. is 'far'"),
    ],
)
def test_a_bad_row_is_refused_by_name(row: dict[str, Any], said: str, write: Any, tokenizer: Any) -> None:
    settings = {"margin_key": "margin"} if "margin" in row else {}
    path = write("a.jsonl", [row])
    with pytest.raises(DataError, match=said) as caught:
        make(path, tokenizer, **settings)
    assert str(path) in str(caught.value) or "train_files" in str(caught.value)


def test_images_are_refused_in_conversations_too(write: Any, tokenizer: Any) -> None:
    path = write("a.jsonl", [{"messages": [*PROMPT, *answer("12")], "images": ["a.png"]}])
    with raises_with(DataError, "'images'"):
        create_sft_dataset(path, SFTDataConfig(), tokenizer)


def test_unusable_pairs_are_left_out_and_counted(write: Any, tokenizer: Any, capsys: Any) -> None:
    rows = [ROW, {**ROW, "rejected": "12"}, {**ROW, "chosen": " "}, {**ROW, "chosen": "1" * 80}, {**ROW, "chosen": "1"}]
    dataset = make(write("a.jsonl", rows), tokenizer, filter_pairs=True, max_length=60)
    assert [pair["index"] for pair in dataset] == [0, 4]
    told = capsys.readouterr().err
    assert (
        "of 5 pairs 3 were left out: 1 with an empty answer, 1 with too many tokens, 1 with two equal answers" in told
    )
    with pytest.raises(DataError, match="no pair is left of 1"):
        make(write("b.jsonl", rows[1:2]), tokenizer, filter_pairs=True)


def test_long_pairs_are_cut_as_truncation_says(write: Any, tokenizer: Any, capsys: Any) -> None:
    path = write("a.jsonl", [{**ROW, "prompt": "Sort: " + "7" * 40, "chosen": "98765", "rejected": "123"}])
    (whole,) = make(path, tokenizer)
    longest = len(whole["chosen"]["input_ids"])
    with raises_with(DataError, f"{longest} tokens", f"data.max_length={longest - 3}"):
        make(path, tokenizer, max_length=longest - 3)
    (right,) = make(path, tokenizer, max_length=longest - 3, truncation="right")
    assert right["chosen"]["input_ids"] == whole["chosen"]["input_ids"][:-3]
    assert right["rejected"] == {name: values[: longest - 3] for name, values in whole["rejected"].items()}
    assert sum(right["chosen"]["loss_mask"]) == sum(whole["chosen"]["loss_mask"]) - 2
    (left,) = make(path, tokenizer, max_length=longest - 3, truncation="left")
    for side in ("chosen", "rejected"):  # the same prompt for both
        assert left[side]["input_ids"] == whole[side]["input_ids"][3:]
    assert capsys.readouterr().err.count("1 of 1 pairs are longer than data.max_length") == 2
    with pytest.raises(DataError, match="would cut a whole answer away"):
        make(path, tokenizer, max_length=20, truncation="right")
    with pytest.raises(DataError, match="would cut the whole prompt away"):
        make(path, tokenizer, max_length=5, truncation="left")


def test_batches_hold_pairs_side_by_side(write: Any, tokenizer: Any) -> None:
    rows = [{**ROW, "chosen": "1" * n, "margin": n / 4} for n in range(1, 5)]
    config = PairsDataConfig(margin_key="margin", shuffle=True, seed=5)
    dataset = create_preference_dataset(write("a.jsonl", rows), config, tokenizer)
    (batch,) = create_pair_loader(config, dataset, 4)
    numbers = [int(number) for number in batch.non_tensor_batch["index"]]
    assert numbers[::2] == numbers[1::2] and sorted(numbers[::2]) == [0, 1, 2, 3] != numbers[::2]
    assert batch.batch["margins"].tolist() == [(number + 1) / 4 for number in numbers]
    assert batch.batch["loss_mask"].sum(1)[::2].tolist() == [number + 2 for number in numbers[::2]]

    rows_of = as_responses(batch, pairs=True)
    totals = Totals.of(rows_of)
    assert totals.sequences == 8 and totals.weight == sum(number + 2 for number in range(4))
    assert normalise(rows_of, totals).batch["nll_weights"].tolist() == pytest.approx([1 / totals.weight, 0.0] * 4)


def test_a_reward_is_read_at_the_last_token() -> None:
    """The only response token follows the last one, so an engine's value before it is that of the last token."""
    ids = torch.tensor([[5, 6, 7, 8], [9, 1, 0, 0]])
    mask = (ids > 0).long()
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1, "loss_mask": mask}
    from hybridrl.protocol import DataProto

    batch = as_scored(DataProto.from_dict(tensors=tensors), pad_token_id=3)
    assert batch.batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.batch["response_mask"].tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
    assert torch.equal(batch.batch["input_ids"][:, :4], ids)


# ---------------------------------------------------------------- conversations


TALK = [*PROMPT, *answer("12"), {"role": "user", "content": "And 43"}, *answer("34")]


def conversations(path: Any, tokenizer: Any, **settings: Any) -> Any:
    return create_sft_dataset(path, SFTDataConfig(shuffle=False, **settings), tokenizer)


def marked(*fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The talk with further fields on its messages."""
    return [{**message, **field} for message, field in zip(TALK, fields, strict=True)]


def test_turns_may_be_left_out_or_weighted(write: Any, tokenizer: Any) -> None:
    rows = [
        {"messages": marked({}, {"train": False}, {}, {})},
        {"messages": marked({}, {"weight": 0}, {}, {"weight": 1})},
        {"messages": marked({}, {"weight": 0.5}, {}, {"weight": 2.0})},
        {"messages": TALK},
    ]
    for name in ("a.jsonl", "a.parquet"):
        first, second, weighted, plain = conversations(write(name, rows), tokenizer)
        assert shown(tokenizer, first)[1] == shown(tokenizer, second)[1] == "34<|im_end|>"
        assert shown(tokenizer, plain)[1] == "12<|im_end|>34<|im_end|>"
        assert first["input_ids"] == plain["input_ids"]  # the template does not see the fields
        assert [w for w in weighted["loss_weight"] if w] == [0.5] * 3 + [2.0] * 3
    config = SFTDataConfig(shuffle=False)
    (batch,) = create_sft_loader(config, conversations(write("b.jsonl", rows[2:]), tokenizer), 2)
    rows_of = as_responses(batch)
    totals = Totals.of(rows_of)
    assert (totals.tokens, totals.weight) == (12, 3 * 0.5 + 3 * 2.0 + 6)
    assert normalise(rows_of, totals).batch["loss_weights"].sum().item() == pytest.approx(1.0)
    assert "loss_weight" not in conversations(write("c.jsonl", rows[:2]), tokenizer)[0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (({}, {"train": True, "weight": 1.0}, {}, {}), "message 1 .assistant. has both 'train' and 'weight'"),
        (({}, {"weight": -1}, {}, {}), "weight=-1; it must be a number that is not negative"),
        (({}, {"train": "no"}, {}, {}), "train='no'; it must be true or false"),
        (({"train": True}, {}, {}, {}), "message 0 .user. is to be trained on"),
        (({}, {"train": False}, {}, {"weight": 0}), "no turn of the assistant is trained on"),
    ],
)
def test_a_wrong_weight_is_refused(fields: Any, said: str, write: Any, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=said):
        conversations(write("a.jsonl", [{"messages": marked(*fields)}]), tokenizer)


TEMPLATE = (
    "{% if tools %}tools:{% for t in tools %}{{ t.function.name }}{{ t.function.strict }};{% endfor %}{% endif %}"
    "{% if enable_thinking is defined %}thinking={{ enable_thinking }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_columns_of_tools_and_thinking_reach_the_template(write: Any, tokenizer: Any) -> None:
    import copy

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    tools = [{"type": "function", "function": {"name": "add", "strict": None}}]
    others = [{"type": "function", "function": {"name": "sub", "strict": True}}]
    rows = [
        {"messages": TALK, "tools": tools, "enable_thinking": True},
        {"messages": TALK, "tools": None, "enable_thinking": False},
        {"messages": TALK, "tools": None, "enable_thinking": None},
        {"messages": TALK, "tools": others, "enable_thinking": None},
    ]
    path = write("a.parquet", rows)
    heads = ["tools:add;thinking=True\n", "thinking=False\n", "", "tools:subTrue;"]
    for row, head in zip(conversations(path, tokenizer), heads, strict=True):
        assert tokenizer.decode(row["input_ids"]).startswith(f"{head}<|im_start|>user\nSort: 21")
        assert shown(tokenizer, row)[1] == "12<|im_end|>34<|im_end|>"
    last = conversations(path, tokenizer, enable_thinking_default=True)[2]
    assert tokenizer.decode(last["input_ids"]).startswith("thinking=True\n")
    named = [{**ROW, "functions": json.dumps(tools)}]
    (pair,) = make(write("b.jsonl", named), tokenizer, tools_key="functions")
    assert tokenizer.decode(pair["chosen"]["input_ids"]).startswith("tools:addNone;<|im_start|>user")


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ({"tools": "[{"}, "column 'tools' .data.tools_key. is text that is no JSON"),
        ({"tools": {"name": "add"}}, "it must be a list of tool schemas"),
        ({"tools": ["add"]}, "each tool is an object"),
        ({"enable_thinking": "yes"}, "is 'yes'; it must be true, false or null"),
    ],
)
def test_wrong_tools_are_refused(column: dict[str, Any], said: str, write: Any, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=said):
        conversations(write("a.jsonl", [{"messages": TALK, **column}]), tokenizer)


def test_a_named_column_of_tools_must_exist(write: Any, tokenizer: Any) -> None:
    with raises_with(DataError, "'functions'", "data.tools_key"):
        conversations(write("a.jsonl", [{"messages": TALK}]), tokenizer, tools_key="functions")


@pytest.mark.parametrize("names", [("score_chosen", "score_rejected"), ("chosen-rating", "rejected-rating")])
def test_pairs_whose_scores_say_the_opposite_are_told(
    names: tuple[str, str], write: Any, tokenizer: Any, capsys: Any
) -> None:
    scores = [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0), (None, 2.0)]
    pair = {"prompt": "Sort: 21", "chosen": "12", "rejected": "21"}
    rows = [{**pair, names[0]: chosen, names[1]: rejected} for chosen, rejected in scores]
    create_preference_dataset(write("a.jsonl", rows), PairsDataConfig(shuffle=False), tokenizer)
    assert f"1 of 4 rows the column {names[0]!r} is below {names[1]!r}" in " ".join(capsys.readouterr().err.split())


def test_margins_below_zero_are_told(write: Any, tokenizer: Any, capsys: Any) -> None:
    rows = [{"prompt": "Sort: 21", "chosen": "12", "rejected": "21", "by": by} for by in (1.0, -2.0, 0.0)]
    settings = PairsDataConfig(shuffle=False, margin_key="by")
    create_preference_dataset(write("a.jsonl", rows), settings, tokenizer)
    assert "in 1 of 3 rows the column 'by' (data.margin_key) is below 0" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("chosen", "rejected"), [("1", "5"), (Decimal("0.5"), Decimal("1.5")), (1, 5.0)])
def test_scores_of_any_type_are_compared(
    chosen: Any, rejected: Any, tmp_path: Path, tokenizer: Any, capsys: Any
) -> None:
    row = {"prompt": "q", "chosen": "12", "rejected": "21", "score_chosen": chosen, "score_rejected": rejected}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    make(tmp_path / "a.parquet", tokenizer)
    assert "1 of 1 rows the column 'score_chosen' is below" in " ".join(capsys.readouterr().err.split())


def test_margins_are_decimals_too_and_have_to_fit_into_32_bits(tmp_path: Path, write: Any, tokenizer: Any) -> None:
    row = {"prompt": "q", "chosen": "12", "rejected": "21"}
    stored = pyarrow.Table.from_pylist([{**row, "by": Decimal("1.5")}])
    pyarrow.parquet.write_table(stored, tmp_path / "m.parquet")
    assert make(tmp_path / "m.parquet", tokenizer, margin_key="by")[0]["margin"] == 1.5
    for wrong in (1e39, -1e39, float("nan"), [1.0], "1", True, None, {"by": 1}, 10**400):
        with pytest.raises(DataError) as error:
            make(write("a.jsonl", [{**row, "by": wrong}]), tokenizer, margin_key="by")
        assert "line 1" in str(error.value) and "data.margin_key" in str(error.value)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**row, "by": float("inf")}]), tmp_path / "i.parquet")
    with raises_with(DataError, "row 0", "data.margin_key", "inf"):
        make(tmp_path / "i.parquet", tokenizer, margin_key="by")


def test_prompts_that_are_not_read_and_differ_are_counted(write: Any, tokenizer: Any, capsys: Any) -> None:
    sides = {"chosen": [*PROMPT, *answer("12")], "rejected": [*PROMPT, *answer("21")]}
    same = ["Sort: 21", " Sort: 21\n", PROMPT, "\n\nHuman: Sort: 21\n\nAssistant:", None, ""]
    others = ["Sort: 99", [{"role": "system", "content": "Be brief."}, *PROMPT], [{"role": "user", "content": "21"}]]
    for number, prompt in enumerate([*same, *others]):
        rows = [{"prompt": prompt, **sides}, {"prompt": prompt, **sides}]
        make(write(f"{number}.jsonl", rows), tokenizer)
        notices = " ".join(capsys.readouterr().err.split())
        assert ("in 2 of 2 pairs the column 'prompt' has another prompt" in notices) == (number >= len(same)), prompt
