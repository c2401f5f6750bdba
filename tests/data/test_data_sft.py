"""Conversations for supervised training: which tokens are learnt, and what is refused."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from raising import raises_with

from hybridrl.config import SFTDataConfig
from hybridrl.data import DataError, create_sft_dataset, create_sft_loader
from hybridrl.data.conversation_dataset import turn_of_token

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second answer."},
]


def make(path, tokenizer, **settings):
    return create_sft_dataset(path, SFTDataConfig(shuffle=False, **settings), tokenizer)


def learnt(tokenizer, item) -> str:
    return tokenizer.decode([i for i, m in zip(item["input_ids"], item["loss_mask"], strict=True) if m])


def test_every_assistant_turn_is_learnt_with_its_end_and_nothing_else(write, tokenizer):
    item = make(write("a.parquet", [{"messages": TALK}]), tokenizer)[0]
    assert tokenizer.decode(item["input_ids"]) == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert learnt(tokenizer, item) == "First.<|im_end|>Second answer.<|im_end|>"


def test_the_prompt_is_what_generation_will_be_given(write, tokenizer):
    """Up to the first learnt token the ids are those of the rendered prompt: what RL feeds the model."""
    item = make(write("a.parquet", [{"messages": TALK[:3]}]), tokenizer)[0]
    prompt = tokenizer.apply_chat_template(TALK[:2], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert item["input_ids"][: item["loss_mask"].index(1)] == list(prompt)


def test_prompt_and_response_columns_equal_messages(write, tokenizer):
    messages = make(write("a.parquet", [{"messages": TALK[1:3]}]), tokenizer)[0]
    columns = {"prompt_key": "question", "response_key": "answer"}
    text = make(write("b.parquet", [{"question": "One?", "answer": "First."}]), tokenizer, **columns)[0]
    chat = make(write("c.parquet", [{"question": TALK[1:2], "answer": "First."}]), tokenizer, **columns)[0]
    assert text == messages == chat


def test_prompt_and_response_may_be_inside_a_column(write, tokenizer):
    """As verl's older fine-tuning commands read them: `prompt_key=extra_info prompt_dict_keys=[question]`."""
    columns = {"prompt_key": "info", "response_key": "info"}
    inside = {"prompt_dict_keys": ["asked", "text"], "response_dict_keys": ["answer"]}
    row = {"info": {"asked": {"text": "One?"}, "answer": "First."}}
    wanted = make(write("a.parquet", [{"messages": TALK[1:3]}]), tokenizer)[0]
    for name in ("b.parquet", "b.jsonl"):
        assert make(write(name, [row]), tokenizer, **columns, **inside)[0] == wanted
    with raises_with(DataError, "line 1", "data.prompt_dict_keys=['ask']", "'info'", "asked, answer", "'ask'"):
        make(write("c.jsonl", [row]), tokenizer, **columns, prompt_dict_keys=["ask"])
    with raises_with(DataError, "data.response_dict_keys=['answer', 'text']"):
        make(write("d.jsonl", [row]), tokenizer, **columns, **{**inside, "response_dict_keys": ["answer", "text"]})


def test_a_system_prompt_begins_conversations_that_have_none(write, tokenizer):
    other = {"system_prompt": "Other."}
    own = make(write("a.parquet", [{"messages": TALK}]), tokenizer)[0]
    assert make(write("a.parquet", [{"messages": TALK}]), tokenizer, **other)[0] == own
    added = make(write("b.parquet", [{"messages": TALK[1:]}]), tokenizer, **other)[0]
    begin = [{"role": "system", "content": "Other."}]
    assert tokenizer.decode(added["input_ids"]) == tokenizer.apply_chat_template(begin + TALK[1:], tokenize=False)
    columns = {"prompt_key": "question", "response_key": "answer", **other}
    text = make(write("c.jsonl", [{"question": "One?", "answer": "First."}]), tokenizer, **columns)[0]
    assert text == make(write("d.jsonl", [{"messages": begin + TALK[1:3]}]), tokenizer)[0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_cuts_ids_and_mask_alike(write, tokenizer, side):
    path = write("a.parquet", [{"messages": TALK}])
    whole = make(path, tokenizer)[0]
    kept = len(whole["input_ids"]) - 20
    cut = make(path, tokenizer, truncation=side, max_length=kept)[0]
    part = slice(-kept, None) if side == "left" else slice(kept)
    assert cut["input_ids"] == whole["input_ids"][part] and cut["loss_mask"] == whole["loss_mask"][part]


def test_overlong_conversation_is_named(write, tokenizer):
    path = write("a.jsonl", [{"messages": TALK[1:3]}, {"messages": TALK}])
    with pytest.raises(DataError, match=r"line 2: the conversation has \d+ tokens, more than data.max_length=40"):
        make(path, tokenizer, max_length=40)


def test_batches_are_right_padded(write, tokenizer):
    dataset = make(write("a.parquet", [{"messages": TALK}, {"messages": TALK[1:3]}]), tokenizer)
    batch = next(iter(create_sft_loader(SFTDataConfig(shuffle=False), dataset, 2)))
    ids, mask, loss = (batch.batch[name] for name in ("input_ids", "attention_mask", "loss_mask"))
    for row in range(2):
        length = len(dataset[row]["input_ids"])
        assert mask[row].tolist() == [1] * length + [0] * (ids.shape[1] - length)
        assert ids[row, :length].tolist() == dataset[row]["input_ids"]
        assert loss[row, :length].tolist() == dataset[row]["loss_mask"] and loss[row, length:].sum() == 0
        assert batch.batch["position_ids"][row, :length].tolist() == list(range(length))


def test_validation_keeps_order_and_the_last_incomplete_batch(write, tokenizer):
    dataset = make(write("a.parquet", [{"messages": TALK}] * 5), tokenizer)
    sizes = [len(batch) for batch in create_sft_loader(SFTDataConfig(), dataset, 2, train=False)]
    assert sizes == [2, 2, 1]


def test_template_that_rewrites_earlier_turns_is_refused(write, tokenizer):
    """As reasoning models do: thoughts are dropped from all turns but the last."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
        "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    thinking = [dict(m) for m in TALK]
    thinking[2]["content"] = "<think>hm</think>First."
    with pytest.raises(DataError, match=r"line 2: the chat template .* is not append-only"):
        make(write("a.jsonl", [{"messages": TALK}, {"messages": thinking}]), tokenizer)
    single = make(write("b.jsonl", [{"messages": thinking[:3]}]), tokenizer)[0]
    assert learnt(tokenizer, single) == "<think>hm</think>First.<|im_end|>"


def test_template_whose_generation_prompt_is_no_prefix_is_refused(write, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[bot]{% endif %}"
    )
    with raises_with(DataError, "[bot]"):
        make(write("a.jsonl", [{"messages": TALK[1:3]}]), tokenizer)


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ("text", "it is text"),
        ([], "empty"),
        ([{"role": "user", "content": "x"}], "no message of role 'assistant'"),
        ([{"role": "assistant"}], "message 0 .assistant. has no 'content'"),
    ],
)
def test_bad_conversation_is_named(write, tokenizer, messages, fault):
    with pytest.raises(DataError, match=rf"line 2: column 'messages' cannot be used as a conversation: .*{fault}"):
        make(write("a.jsonl", [{"messages": TALK}, {"messages": messages}]), tokenizer)


def test_bad_prompt_and_response_are_named(write, tokenizer):
    keys = {"prompt_key": "q", "response_key": "a"}
    with raises_with(DataError, "line 1", "'a'"):
        make(write("a.jsonl", [{"q": "x", "a": ""}]), tokenizer, **keys)
    with raises_with(DataError, "line 1", "'q'"):
        make(write("a.jsonl", [{"q": 5, "a": "x"}]), tokenizer, **keys)
    with raises_with(DataError, "line 1", "'a'", "'\\ud800'"):
        make(write("a.jsonl", [{"q": "x", "a": "y\ud800"}]), tokenizer, **keys)
    with raises_with(DataError, "'q'"):
        make(write("a.jsonl", [{"a": "x"}]), tokenizer, **keys)
    with pytest.raises(DataError, match="set both"):
        make(write("a.jsonl", [{"a": "x"}]), tokenizer, prompt_key="q")
    with raises_with(DataError, "'messages'", "data.prompt_key", "data.response_key"):
        make(write("a.jsonl", [{"a": "x"}]), tokenizer)


def test_a_token_across_the_border_belongs_to_the_prompt():
    offsets = np.array([[0, 3], [3, 6], [6, 6], [6, 9], [9, 12]])
    assert turn_of_token(offsets, [(5, 11)]).tolist() == [0, 0, 0, 1, 1]
    assert turn_of_token(offsets, [(0, 3), (5, 11)]).tolist() == [1, 0, 0, 2, 2]


def test_a_run_without_eos_in_its_turns_is_warned(write, tokenizer, capsys):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    make(write("a.jsonl", [{"messages": TALK}]), tokenizer)
    assert "no learnt turn contains the EOS token" in capsys.readouterr().err


def test_cut_conversations_are_told_and_those_with_nothing_to_learn(write, tokenizer, capsys):
    long = [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "late"}]
    rows = [{"messages": TALK[1:3]}, {"messages": long}]
    dataset = make(write("a.jsonl", rows), tokenizer, max_length=100, truncation="right")
    assert [sum(row["loss_mask"]) > 0 for row in dataset] == [True, False]
    assert "1 of 2 conversations are longer than data.max_length=100" in (told := capsys.readouterr().err)
    assert "in 1 of them no turn of the assistant is left" in told
    with pytest.raises(DataError, match="no turn of the assistant is left in any of them"):
        make(write("b.jsonl", rows[1:]), tokenizer, max_length=100, truncation="right")


def test_resume_of_supervised_batches(write, tokenizer):
    dataset = make(write("a.parquet", [{"messages": TALK}] * 8), tokenizer)
    config = SFTDataConfig(seed=3)
    whole, first, second = (create_sft_loader(config, dataset, 2) for _ in range(3))
    order = [batch.non_tensor_batch["index"].tolist() for _ in range(2) for batch in whole]
    iterator = iter(first)
    head = [next(iterator).non_tensor_batch["index"].tolist() for _ in range(3)]
    second.load_state_dict(first.state_dict())
    assert head + [b.non_tensor_batch["index"].tolist() for _ in range(2) for b in second] == order


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_of_a_prompt_and_a_response_the_response_alone_is_learnt(write, tokenizer, name):
    keys = {"prompt_key": "q", "response_key": "a"}
    (item,) = make(write(name, [{"q": TALK[:4], "a": "Second answer."}]), tokenizer, **keys)
    assert learnt(tokenizer, item) == "Second answer.<|im_end|>"
    assert item["input_ids"] == make(write(f"b{name}", [{"messages": TALK}]), tokenizer)[0]["input_ids"]
    marked = [*TALK[:2], {**TALK[2], "train": True}, TALK[3]]
    (item,) = make(write(f"c{name}", [{"q": marked, "a": "Second answer."}]), tokenizer, **keys)
    assert learnt(tokenizer, item) == "First.<|im_end|>Second answer.<|im_end|>"
    with pytest.raises(DataError) as error:
        make(write(f"d{name}", [{"q": TALK[:3], "a": "Second answer."}]), tokenizer, **keys)
    assert "column 'q'" in str(error.value) and "of the assistant" in str(error.value)


def test_turns_that_are_not_learnt_may_change_when_the_conversation_goes_on(write, tokenizer):
    """As with templates that drop the thoughts of earlier turns."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    talk = [*TALK[1:2], {"role": "assistant", "content": "<think>Hm.</think>First."}, *TALK[3:]]
    with pytest.raises(DataError, match="append-only"):
        make(write("a.jsonl", [{"messages": talk}]), own)
    (item,) = make(write("b.jsonl", [{"q": talk[:3], "a": "Second."}]), own, prompt_key="q", response_key="a")
    assert learnt(own, item) == "Second.<|im_end|>" and "Hm." not in own.decode(item["input_ids"])


AS_TEXT = [
    '[{"name": null, "role": "user", "content": "Sort"}, {"role": "assistant", "content": "12"}]',
    "[{'id': 1, 'role': 'user', 'content': None}, {'role': 'assistant', 'content': 'x'}]",
    '[{"from": "human", "value": "Sort"}, {"from": "gpt", "value": "12"}]',
    ' [ {"content": "12", "role": "assistant"} ]\n',
    '{"role": "user", "content": "Sort"}',
    "{'content': 'Sort', 'role': 'user'}",
    '{"messages": [{"role": "user", "content": "Sort"}, {"role": "assistant", "content": "12"}]}',
    '{"conversations": [{"from": "human", "value": "Sort"}]}',
    json.dumps('[{"role": "user", "content": "Sort"}]'),
    json.dumps('{"role": "user", "content": "Sort"}'),
]


@pytest.mark.parametrize("text", AS_TEXT)
def test_a_conversation_that_is_written_as_text_is_refused(write, tokenizer, text):
    from hybridrl.config import PairsDataConfig
    from hybridrl.data import create_preference_dataset

    keys = {"prompt_key": "q", "response_key": "a"}
    pairs = [{"prompt": "q", "chosen": text, "rejected": "b"}, {"prompt": text, "chosen": "a", "rejected": "b"}]
    for number, row in enumerate([{"q": text, "a": "b"}, {"q": "b", "a": text}]):
        with pytest.raises(DataError, match="list of messages written as text"):
            make(write(f"{number}.jsonl", [row]), tokenizer, **keys)
    for number, row in enumerate(pairs):
        with pytest.raises(DataError, match="list of messages written as text"):
            create_preference_dataset(write(f"p{number}.jsonl", [row]), PairsDataConfig(), tokenizer)
    records = ('{"role": "king", "content": "gold"}', '{"model": "m", "messages": []}', '{"messages": 3}', '"quoted"')
    for fine in ('[{"name": "Ada"}]', "[{", '[{"role": "king"}]', "{}", f"{text} Go on.", *records):
        assert len(make(write("f.jsonl", [{"q": "b", "a": fine}]), tokenizer, **keys)) == 1
