"""Messages of data files: their forms, fields that other libraries write, last turns of prompts, equal pairs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.config import DataConfig, GenerationDataConfig, PairsDataConfig, SFTDataConfig
from hybridrl.data import DataError, create_preference_dataset, create_rl_dataset, create_sft_dataset
from hybridrl.models.chat import as_messages
from tests.agents.template_families import FAMILIES

QUESTION = {"role": "user", "content": "Sort: 21"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def answer(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


@pytest.fixture(scope="module")
def chatml(tokenizer: Any) -> Any:
    """A tokenizer whose template takes text alone."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = CHATML
    return own


def sft(path: Any, tokenizer: Any, **settings: Any) -> Any:
    return create_sft_dataset(path, SFTDataConfig(shuffle=False, **settings), tokenizer)


def prompts(path: Any, tokenizer: Any, **settings: Any) -> Any:
    return create_rl_dataset(path, DataConfig(shuffle=False, **settings), tokenizer)


def learnt(tokenizer: Any, item: dict[str, Any]) -> str:
    return tokenizer.decode([i for i, m in zip(item["input_ids"], item["loss_mask"], strict=True) if m])


# ------------------------------------------------------------------ one form


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_text_parts_are_text(write: Any, chatml: Any, name: str) -> None:
    talk = [QUESTION, answer("12")]
    path = write(name, [{"prompt": talk[:1], "messages": talk, "chosen": talk, "rejected": [QUESTION, answer("2")]}])
    plain = (prompts(path, chatml)[0]["input_ids"], sft(path, chatml)[0])
    row = {"prompt": [in_parts(QUESTION)], "messages": [in_parts(message) for message in talk]}
    path = write(f"parts_{name}", [row])
    item = prompts(path, chatml)[0]
    assert (item["input_ids"], sft(path, chatml)[0]) == plain
    assert item["raw_prompt"] == [QUESTION]  # what rewards and agents read
    assert "Sort: 21" in chatml.decode(plain[0])


def called(name: str, arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [QUESTION, answer("", tool_calls=[call]), {"role": "tool", "content": "5"}, answer("5")]


def test_calls_from_parquet_and_from_text_are_those_of_json(write: Any, chatml: Any) -> None:
    calls = [("weather", {"city": "Rome"}), ("add", {"a": 2, "b": 3})]
    rows = [{"messages": called(name, arguments)} for name, arguments in calls]
    as_text = [{"messages": called(name, json.dumps(arguments))} for name, arguments in calls]
    expected = [item["input_ids"] for item in sft(write("a.jsonl", rows), chatml)]
    assert 'weather {"city": "Rome"}<|im_end|>' in chatml.decode(expected[0])
    for path in (write("a.parquet", rows), write("t.jsonl", as_text), write("t.parquet", as_text)):
        assert [item["input_ids"] for item in sft(path, chatml)] == expected


@pytest.mark.parametrize("name", ["parameters", "args", "input"])
def test_arguments_by_another_name_are_refused(write: Any, chatml: Any, name: str) -> None:
    talk = called("add", {"a": 2})
    talk[1]["tool_calls"][0]["function"][name] = talk[1]["tool_calls"][0]["function"].pop("arguments")
    with raises_with(DataError, "line 1", "add", f"'{name}'", "'arguments'"):
        sft(write("a.jsonl", [{"messages": talk}]), chatml)


def test_nulls_of_json_are_values(write: Any, chatml: Any) -> None:
    tokenizer = copy.deepcopy(chatml)
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    schema = {"properties": {"unit": {"default": None, "enum": [None, "C"]}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    other = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "int"}}}}}]
    rows = [
        {"messages": called("weather", {"city": "Rome", "unit": None}), "tools": tools},
        {"messages": called("add", {"a": 2}), "tools": other},
    ]
    first, second = sft(write("a.jsonl", rows), tokenizer)
    assert '{"default": null, "enum": [null, "C"]}' in tokenizer.decode(first["input_ids"])
    assert 'weather {"city": "Rome", "unit": null}' in tokenizer.decode(first["input_ids"])
    stored = [{**row, "messages": called("add", {"a": 2})} for row in rows]
    from_json = [item["input_ids"] for item in sft(write("b.jsonl", stored), tokenizer)]
    assert [item["input_ids"] for item in sft(write("b.parquet", stored), tokenizer)] == from_json
    assert "null" not in tokenizer.decode(second["input_ids"])


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(str.strip)


@st.composite
def talks(draw: Any) -> list[dict[str, Any]]:
    """Conversations of one call to one of two tools, whose arguments are always written in the same order."""
    if draw(st.booleans()):
        name, arguments = "weather", {"city": draw(TEXT), "days": draw(st.integers(0, 99))}
    else:
        name, arguments = "add", {"a": draw(st.integers(0, 99)), "note": {"text": draw(TEXT)}}
    function = {"name": name, "arguments": arguments}
    call = {"id": f"functions.{name}:0", "type": "function", "function": function}
    optional = {"name": "Ada"} if draw(st.booleans()) else {}
    return [
        {"role": "user", "content": draw(TEXT), **optional},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": draw(TEXT), "tool_call_id": call["id"]},
    ]


@pytest.mark.parametrize("name", FAMILIES)
@given(rows=st.lists(talks(), min_size=1, max_size=3))
def test_parquet_gives_the_tokens_of_json(tmp_path_factory: Any, tokenizer: Any, name: str, rows: Any) -> None:
    own = copy.copy(tokenizer)
    own.chat_template = FAMILIES[name].template
    folder = tmp_path_factory.getbasetemp()
    lines, stored = folder / f"{name}.jsonl", folder / f"{name}.parquet"
    lines.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": row} for row in rows]), stored)

    def outcome(path: Path) -> Any:
        try:
            return [item["input_ids"] for item in prompts(path, own, max_prompt_length=4096)]
        except DataError as error:
            return str(error).split(": ", 1)[1]

    assert outcome(lines) == outcome(stored)


def test_text_that_the_template_leaves_out_names_row_and_turn(write: Any, tokenizer: Any) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = (
        "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.content }}>{% endfor %}"
        "{% if add_generation_prompt %}<{% endif %}"
    )
    talk = [QUESTION, {"role": "critic", "content": "again"}]
    path = write("a.jsonl", [{"prompt": [QUESTION]}, {"prompt": talk}])
    for settings in ({}, {"truncation": "left"}, {"filter_overlong_prompts": True}):  # all at the start of a run
        with raises_with(DataError, "line 2", "message 1", "'again'"):
            prompts(path, own, **settings)
    with raises_with(DataError, "line 1", "message 1 (critic)"):
        sft(write("b.jsonl", [{"messages": [*talk, answer("12")]}]), own)
    sides = {"chosen": [*talk, answer("12")], "rejected": [*talk, answer("21")]}
    with raises_with(DataError, "line 1", "message 1 (critic)"):
        create_preference_dataset(write("c.jsonl", [sides]), PairsDataConfig(), own)


# ------------------------------------------------------------------ fields


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    "field",
    [
        *({"loss_mask": 0}, {"loss": False}, {"trainable": False}, {"train": False}, {"step_loss_mask": 0}),
        *({"weight": 0}, {"masked": True}, {"is_masked": 1}),
    ],
)
def test_flags_of_other_libraries_act(write: Any, tokenizer: Any, name: str, field: dict[str, Any]) -> None:
    talk = [QUESTION, answer("98", **field), QUESTION, answer("12")]
    plain = [QUESTION, answer("98"), QUESTION, answer("12")]
    marked, unmarked = sft(write(name, [{"messages": talk}, {"messages": plain}]), tokenizer)
    assert learnt(tokenizer, marked) == "12<|im_end|>"
    assert learnt(tokenizer, unmarked) == "98<|im_end|>12<|im_end|>"
    assert marked["input_ids"] == unmarked["input_ids"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [QUESTION, answer("1", loss_mask=[0, 1])]}, r"message 1 .assistant. has loss_mask=\[0, 1\]"),
        ({"messages": [QUESTION, answer("1", loss="no")]}, "has loss='no'; it must be true or false"),
        ({"messages": [QUESTION, answer("1", loss_mask=0.5)]}, "has loss_mask=0.5; it must be true or false"),
        ({"messages": [QUESTION, answer("1", loss=True, train=True)]}, "has both 'loss' and 'train'"),
        *[
            ({"messages": [QUESTION, answer("1", **{name: value})]}, rf"message 1 .assistant. has {name}=")
            for name, value in [
                *[(name, False) for name in ("is_trained", "include_in_loss", "compute_loss", "do_train", "noLoss")],
                *[(name, 0) for name in ("train_mask", "sft_mask", "mask", "supervise")],
                *[("token_mask", [0, 1]), ("train_detail", [{"begin_offset": 0, "end_offset": 1, "train": False}])],
                ("masked", "yes"),
            ]
        ],
        ({"messages": [QUESTION, answer("1", reasoning_content="why")]}, "does not read 'reasoning_content'"),
        ({"messages": [QUESTION, answer("1", thinking="why")]}, "does not read 'thinking'"),
        ({"messages": [QUESTION, answer("1")], "loss_mask": [0, 1]}, "column 'loss_mask' is not read"),
    ],
)
def test_fields_that_cannot_act_are_refused(row: dict[str, Any], said: str, write: Any, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=said):
        sft(write("a.jsonl", [row]), tokenizer)


@pytest.mark.parametrize("file", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    ("column", "value", "is_refused"),
    [
        *[(name, [-100, 7, 7], True) for name in ("labels", "weights", "weight", "loss", "train", "loss_scale")],
        *[(name, 0.5, True) for name in ("weight", "weights", "loss_scale", "loss_weight", "sample_weight")],
        *[(name, False, True) for name in ("train", "training", "learn", "loss", "trainable")],
        *[("labels", value, False) for value in ("algebra", ["algebra"], 3)],
        *[("train", "split 1", False), ("loss", 0.25, False), ("weight", "12 kg", False), ("turn_mask", [1], False)],
    ],
)
def test_a_column_with_the_form_of_a_mask_is_refused(
    column: str, value: Any, is_refused: bool, file: str, write: Any, tokenizer: Any, capsys: Any
) -> None:
    """By its name or by its values: they would say what is learnt, and nothing reads them."""
    rows = [{"messages": [QUESTION, answer("1")], column: None}, {"messages": [QUESTION, answer("2")], column: value}]
    if not is_refused:
        sft(write(file, rows), tokenizer)
        assert f"columns '{column}' are not read" in " ".join(capsys.readouterr().err.split())
        return
    with pytest.raises(DataError) as refused:
        sft(write(file, rows), tokenizer)
    assert f"column '{column}'" in str(refused.value)


def test_fields_that_no_template_reads_are_named_once_with_their_rows(write: Any, tokenizer: Any, capsys: Any) -> None:
    named = {**QUESTION, "name": "Ada", "id": 7}
    rows = [{"messages": [named, answer("12")]}, {"messages": [named, answer("12", id=8)]}]
    path = write("a.jsonl", [*rows, {"messages": [QUESTION, answer("12")]}])
    sft(path, tokenizer)
    told = capsys.readouterr().err
    assert told.count("does not read have no effect: 'id' (2 rows), 'name' (2 rows)") == 1
    fine = answer("12", train_id=5, mask="all", weight_kg=0.5, lossless=True, training_data="x")
    assert learnt(tokenizer, sft(write("d.jsonl", [{"messages": [{**QUESTION, "masked": False}, fine]}]), tokenizer)[0])
    assert "'train_id' (1 rows)" in capsys.readouterr().err
    prompts(write("b.jsonl", [{"prompt": [answer("1", weight=0), QUESTION]}]), tokenizer)
    assert "'weight' (1 rows)" in capsys.readouterr().err
    sft(write("c.jsonl", [{"messages": [QUESTION, answer("12")], "body_weight": 0.5}]), tokenizer)
    assert "columns 'body_weight' are not read" in capsys.readouterr().err


# ------------------------------------------------------------------ the assistant first and last


@pytest.mark.parametrize("name", ["qwen", "llama3", "gpt-oss"])
def test_a_conversation_may_begin_with_the_assistant(write: Any, tokenizer: Any, name: str) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = FAMILIES[name].template
    talk = [answer("Hello"), QUESTION, answer("12")]
    for messages in (talk, [{"role": "system", "content": "Be brief"}, *talk]):
        (item,) = sft(write("a.jsonl", [{"messages": messages}]), own)
        first, second = learnt(own, item).split("12")
        assert first.startswith("Hello") and "Sort" not in first + second


def test_of_two_turns_in_a_row_the_opening_of_the_second_is_not_learnt(write: Any, chatml: Any) -> None:
    row = {"messages": [QUESTION, answer("12"), answer("21")]}
    (item,) = sft(write("a.jsonl", [row]), chatml)
    assert learnt(chatml, item) == "12<|im_end|>21<|im_end|>"
    sides = {name: [QUESTION, answer("12"), answer(text)] for name, text in (("chosen", "21"), ("rejected", "22"))}
    (pair,) = create_preference_dataset(write("b.jsonl", [sides]), PairsDataConfig(), chatml)
    assert learnt(chatml, pair["chosen"]) == "21<|im_end|>"


def test_empty_turns_and_repeated_prompts_are_told_with_their_rows(write: Any, tokenizer: Any, capsys: Any) -> None:
    rows = [{"messages": [QUESTION, answer(text)]} for text in ("12", "", " ", "21")]
    sft(write("a.jsonl", rows), tokenizer)
    assert "2 of 4 rows have an empty turn of the assistant" in " ".join(capsys.readouterr().err.split())
    text = QUESTION["content"]
    pairs = [
        {"prompt": text, "chosen": f"{text} 1", "rejected": f"{text} 2"},
        {"prompt": text, "chosen": "1", "rejected": "2"},
    ]
    create_preference_dataset(write("b.jsonl", pairs), PairsDataConfig(prompt_key="prompt"), tokenizer)
    assert "in 1 of 2 pairs both answers begin with the prompt" in " ".join(capsys.readouterr().err.split())


def test_responses_that_begin_with_their_prompt_are_told(write: Any, tokenizer: Any, capsys: Any) -> None:
    keys = {"prompt_key": "q", "response_key": "a"}
    text = QUESTION["content"]
    sft(
        write("a.jsonl", [{"q": text, "a": f"{text} 12"}, {"q": text, "a": "12"}, {"q": "12", "a": "12 3"}]),
        tokenizer,
        **keys,
    )
    assert "in 1 of 3 rows the response begins with the prompt" in " ".join(capsys.readouterr().err.split())
    with raises_with(DataError, "data.prompt_key=q", "data.response_key=q"):
        sft(write("b.jsonl", [{"q": text}]), tokenizer, prompt_key="q", response_key="q")
    inner = {"prompt_dict_keys": ["q"], "response_dict_keys": ["a"]}
    both = write("c.jsonl", [{"x": {"q": text, "a": "12"}}])
    assert learnt(tokenizer, sft(both, tokenizer, prompt_key="x", response_key="x", **inner)[0]) == "12<|im_end|>"


@pytest.mark.parametrize("column", ["tools", "enable_thinking"])
def test_columns_that_the_template_does_not_read_are_told(write: Any, chatml: Any, capsys: Any, column: str) -> None:
    value = [{"type": "function", "function": {"name": "add"}}] if column == "tools" else True
    rows = [{"messages": [QUESTION, answer("12")], column: each} for each in (value, None, value)]
    pairs = [{"prompt": "q", "chosen": "1", "rejected": "2", column: value}]
    sft(write("a.jsonl", rows), chatml)
    assert f"2 of 3 rows have {column} in column '{column}'" in " ".join(capsys.readouterr().err.split())
    create_preference_dataset(write("b.jsonl", pairs), PairsDataConfig(), chatml)
    assert f"1 of 1 rows have {column}" in " ".join(capsys.readouterr().err.split())
    own = copy.deepcopy(chatml)
    own.chat_template = "{{ " + column + " }}" + own.chat_template
    sft(write("c.jsonl", rows[:1]), own)
    assert column not in capsys.readouterr().err


def test_settings_of_rendering_that_cannot_act_are_named(write: Any, chatml: Any, capsys: Any) -> None:
    system = {"role": "system", "content": "Be brief"}
    row = {"messages": [system, QUESTION, answer("12")], "prompt": [system, QUESTION]}
    with raises_with(DataError, "data.enable_thinking_default=True", "enable_thinking"):
        sft(write("a.jsonl", [row]), chatml, enable_thinking_default=True)
    for make in (sft, prompts):
        make(write("b.jsonl", [row, row]), chatml, system_prompt="Be kind")
        assert "data.system_prompt has no effect" in " ".join(capsys.readouterr().err.split())
        make(write("c.jsonl", [row, {name: talk[1:] for name, talk in row.items()}]), chatml, system_prompt="Be kind")
        assert "data.system_prompt" not in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["error", "continue", "ground_truth"])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_an_instruction_behind_an_answer_hides_it_not(write: Any, chatml: Any, role: str, setting: str) -> None:
    talk = [QUESTION, answer("12"), {"role": role, "content": "Be brief"}]
    with raises_with(DataError, "line 1", role, "assistant"):
        prompts(write("a.jsonl", [{"prompt": talk}]), chatml, last_assistant_turn=setting)
    assert prompts(write("b.jsonl", [{"prompt": [*talk, QUESTION]}, {"prompt": [talk[0], talk[2]]}]), chatml)


def test_pairs_may_begin_with_the_assistant(write: Any, tokenizer: Any) -> None:
    sides = {"chosen": [answer("Hello"), QUESTION, answer("12")], "rejected": [answer("Hello"), QUESTION, answer("21")]}
    (pair,) = create_preference_dataset(write("a.jsonl", [sides]), PairsDataConfig(), tokenizer)
    assert learnt(tokenizer, pair["chosen"]) == "12<|im_end|>"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_last_turn_of_the_assistant_is_never_part_of_a_prompt_unsaid(write: Any, tokenizer: Any, name: str) -> None:
    rows = [
        {"messages": [QUESTION, answer("12")]},
        {"messages": [{"role": "user", "content": "Sort: 54"}, answer("45")]},
    ]
    path = write(name, rows)
    for settings in ({}, {"truncation": "left"}):
        with raises_with(DataError, "'12'", "data.last_assistant_turn=ground_truth"):
            prompts(path, tokenizer, prompt_key="messages", **settings)
    with raises_with(DataError, "data.last_assistant_turn=ground_truth"):
        prompts(path, tokenizer)
    split = prompts(path, tokenizer, prompt_key="messages", last_assistant_turn="ground_truth")
    plain = prompts(write("p.jsonl", [{"prompt": [QUESTION]}]), tokenizer)
    assert split[0]["input_ids"] == plain[0]["input_ids"] and split[0]["raw_prompt"] == [QUESTION]
    assert [item["reward_model"]["ground_truth"] for item in split] == ["12", "45"]
    going_on = prompts(path, tokenizer, prompt_key="messages", last_assistant_turn="continue")
    assert tokenizer.decode(going_on[0]["input_ids"]) == tokenizer.decode(plain[0]["input_ids"]) + "12"
    generation = GenerationDataConfig(prompt_key="messages")
    with raises_with(DataError, "data.last_assistant_turn"):
        create_rl_dataset(path, generation, tokenizer)


def test_answers_that_cannot_be_split_are_refused(write: Any, rows: Any, tokenizer: Any) -> None:
    def refused(row: dict[str, Any], said: str, setting: str = "ground_truth", **settings: Any) -> None:
        with pytest.raises(DataError, match=said):
            prompts(write("a.jsonl", [row]), tokenizer, last_assistant_turn=setting, **settings)

    refused({"prompt": [QUESTION]}, "the last message is of the role 'user'")
    refused({"prompt": [answer("12")]}, "nothing is left of the prompt")
    refused({"prompt": [QUESTION, answer("1"), answer("2")]}, "a part of the answer would stay in the prompt")
    refused({"prompt": [QUESTION, answer("12")], "reward_model": {}}, "column 'reward_model' is the ground truth")
    refused({"prompt": [QUESTION, answer("12")], "a": "1"}, "column 'a' is the ground truth", ground_truth_key="a")
    call = [{"function": {"name": "add", "arguments": {}}}]
    refused({"prompt": [QUESTION, answer("", tool_calls=call)]}, "has tool calls", "continue")


# ------------------------------------------------------------------ equal pairs


def test_pairs_that_are_equal_as_tokens_are_refused_and_counted(write: Any, tokenizer: Any, capsys: Any) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
    right = {"prompt": "Sort: 21", "chosen": "12", "rejected": "21"}
    rows = [{**right, "rejected": " 12"}, right, {**right, "rejected": "12\n"}]
    path = write("a.jsonl", rows)
    with pytest.raises(DataError, match=r"line 1: .*same tokens.*Of 3 pairs 2 with two equal answers.*line 3"):
        create_preference_dataset(path, PairsDataConfig(), own)
    kept = create_preference_dataset(path, PairsDataConfig(filter_pairs=True), own)
    assert [pair["index"] for pair in kept] == [1]
    assert "2 with two equal answers" in capsys.readouterr().err


def test_pairs_that_are_equal_once_cut_are_refused(write: Any, tokenizer: Any) -> None:
    row = {"prompt": "Sort: 21", "chosen": "1234", "rejected": "1256"}
    longest = len(
        create_preference_dataset(write("a.jsonl", [row]), PairsDataConfig(), tokenizer)[0]["chosen"]["input_ids"]
    )
    with pytest.raises(DataError, match="cut to it the two answers are the same"):
        create_preference_dataset(
            write("b.jsonl", [row]), PairsDataConfig(max_length=longest - 4, truncation="right"), tokenizer
        )


@pytest.mark.parametrize("kind", ["prompts", "conversations", "pairs"])
def test_special_tokens_in_the_text_of_messages_are_told(kind: str, write: Any, tokenizer: Any, capsys: Any) -> None:
    """Files whose texts were rendered before: the end of an answer was learnt twice, and nobody said so."""
    texts = ["12", "12<|im_end|>", "a<b|>c"]
    if kind == "prompts":
        rows: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
        create_rl_dataset(write("a.jsonl", rows), DataConfig(shuffle=False), tokenizer)
    elif kind == "conversations":
        question = {"role": "user", "content": "?"}
        rows = [{"messages": [question, {"role": "assistant", "content": text}]} for text in texts]
        create_sft_dataset(write("a.jsonl", rows), SFTDataConfig(shuffle=False), tokenizer)
    else:
        rows = [{"prompt": "?", "chosen": text, "rejected": "13"} for text in texts]
        create_preference_dataset(write("a.jsonl", rows), PairsDataConfig(shuffle=False), tokenizer)
    told = " ".join(capsys.readouterr().err.split())
    assert "1 of 3 rows" in told and "'<|im_end|>'" in told and "special tokens" in told


@pytest.mark.parametrize("arguments", [[1, 2], ["a"], 5, True, 1.5, [["a", 1]]])
def test_arguments_of_calls_that_are_no_object_are_refused(arguments: Any, write: Any, chatml: Any) -> None:
    with pytest.raises(DataError, match=rf"line 1.*message 1 .assistant..*add are {type(arguments).__name__}"):
        sft(write("a.jsonl", [{"messages": called("add", arguments)}]), chatml)


def test_maps_of_parquet_are_arguments(tmp_path: Path, write: Any, chatml: Any) -> None:
    function = pyarrow.struct(
        [("name", pyarrow.string()), ("arguments", pyarrow.map_(pyarrow.string(), pyarrow.int64()))]
    )
    message = pyarrow.struct(
        [
            ("role", pyarrow.string()),
            ("content", pyarrow.string()),
            ("tool_calls", pyarrow.list_(pyarrow.struct([("type", pyarrow.string()), ("function", function)]))),
        ]
    )
    column = pyarrow.array([called("add", [("a", 2)])], pyarrow.list_(message))
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), tmp_path / "m.parquet")
    expected = sft(write("a.jsonl", [{"messages": called("add", {"a": 2})}]), chatml)[0]
    assert sft(tmp_path / "m.parquet", chatml)[0] == expected


def test_roles_that_the_template_does_not_name_are_reported_once(write: Any, tokenizer: Any, capsys: Any) -> None:
    talk = [{"role": "moderator", "content": "Begin."}, QUESTION]
    prompts(write("a.jsonl", [{"prompt": talk}, {"prompt": talk}, {"prompt": [QUESTION]}]), tokenizer)
    warning = " ".join(capsys.readouterr().err.split())
    assert warning.count("'moderator' (2 rows)") == 1 and "'user'" not in warning
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{#- 'moderator' -#}" + tokenizer.chat_template
    prompts(write("b.jsonl", [{"prompt": talk}]), own)
    assert "moderator" not in capsys.readouterr().err
    called_by = [*called("add", {"a": 2})[:2], {"role": "function", "content": "5"}]
    for name, template in {"calls": CHATML, "role": "{% if m.role == 'function' %}{% endif %}" + CHATML}.items():
        own.chat_template = template.replace("m.role ==", "messages[0].role ==")
        prompts(write(f"{name}.jsonl", [{"prompt": called_by}]), own)
        assert ("'function' (1 rows)" in capsys.readouterr().err) is (name == "calls")
    with pytest.raises(DataError, match=r"the role 'model'.*write 'assistant'"):
        prompts(write("c.jsonl", [{"prompt": [QUESTION, {"role": "model", "content": "12"}, QUESTION]}]), tokenizer)


def test_a_call_in_its_old_form_is_refused_with_the_new_one(write: Any, chatml: Any) -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}}
    with pytest.raises(DataError, match=r"line 1.*'tool_calls' for 'function_call'"):
        sft(write("a.jsonl", [{"messages": [QUESTION, old]}]), chatml)


def test_columns_that_other_libraries_show_the_model_are_named(write: Any, tokenizer: Any, capsys: Any) -> None:
    talk = {"messages": [QUESTION, answer("12")], "prompt": "Sort: 21", "chosen": "12", "rejected": "21"}
    path = write("a.jsonl", [{**talk, "system": "Be brief.", "input": "", "history": None, "turn_mask": [1]}])
    for read in (sft, prompts, lambda *own: create_preference_dataset(own[0], PairsDataConfig(), own[1])):
        read(path, tokenizer)
        notices = " ".join(capsys.readouterr().err.split())
        assert notices.count("columns 'system' are not read") == 1
        assert ("columns 'turn_mask' are not read" in notices) == (read is sft)
    sft(write("b.jsonl", [{"input": "Sort", "output": "12"}]), tokenizer, prompt_key="input", response_key="output")
    assert "'input'" not in capsys.readouterr().err


@pytest.mark.parametrize("value", [{"bytes": "x", "path": None}, {"bytes": None, "path": "a"}, "a/b.PNG", ["b.jpg"]])
@pytest.mark.parametrize("name", ["image", "video", "audio"])
def test_media_in_columns_of_one_are_refused(name: str, value: Any, write: Any, tokenizer: Any) -> None:
    row = {"prompt": "Sort: 21", "messages": [QUESTION, answer("12")]}
    for read in (prompts, sft):
        with pytest.raises(DataError) as error:
            read(write("a.jsonl", [{**row, name: value}]), tokenizer)
        assert repr(name) in str(error.value)
        for fine in (None, "a cat", 3, [], {"width": 3}):
            assert len(read(write("b.jsonl", [{**row, name: fine}]), tokenizer)) == 1


@pytest.mark.parametrize("written", ["NaN", "1e400", "-Infinity"])
def test_arguments_as_text_with_no_number_stay_the_text_that_they_are(written: str) -> None:
    text = f'{{"x": {written}}}'
    (message,) = as_messages(
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}]
    )
    assert message["tool_calls"][0]["function"]["arguments"] == text
