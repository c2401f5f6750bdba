"""Columns of data files reach the reward function by name, as they stand in the file."""

from __future__ import annotations

import gzip
import json

import pytest
from raising import raises_with
from transformers import PreTrainedTokenizerBase

from hybridrl.data import create_rl_dataset, create_train_loader
from hybridrl.data.ground_truth import report_missing
from hybridrl.reward import RewardError, create_reward_manager

CHECKED = """
def compute_score(solution_str, ground_truth, question, level, index_in_file, tag="none"):
    number = question[-1]
    assert ground_truth == "0" + number, (ground_truth, question)
    assert (level, tag) == ("easy" if int(number) % 2 else None, "none"), (level, tag)
    assert index_in_file == number
    return float(solution_str == number)
"""


@pytest.fixture
def dataset(tmp_path, config, tokenizer: PreTrainedTokenizerBase):
    for part in (0, 1):
        rows = [f"Sort: {n},0{n},{'easy' if n % 2 else ''},{n}" for n in range(4 * part, 4 * part + 4)]
        text = "\n".join(["question,answer,level,index_in_file", *rows]) + "\n"
        (tmp_path / f"part{part}.csv.gz").write_bytes(gzip.compress(text.encode()))
    config.data.prompt_key, config.data.ground_truth_key = "question", "answer"
    config.data.train_batch_size = 8
    return create_rl_dataset(str(tmp_path / "part*.csv.gz"), config.data, tokenizer)


def test_columns_of_csv_files_reach_the_function(dataset, config, tokenizer, make_batch, user_file):
    config.reward.custom_reward_function.path = user_file(CHECKED)
    (prompts,) = create_train_loader(config.data, dataset)
    columns = {name: values.tolist() for name, values in prompts.non_tensor_batch.items()}
    numbers = [question[-1] for question in columns["question"]]
    assert sorted(numbers) == list("01234567")
    batch = make_batch([*numbers[:5], "x", "y", "z"], **columns)
    manager = create_reward_manager(config, tokenizer)
    try:
        manager.check(dataset)
        assert manager(batch).sum(-1).tolist() == [1.0] * 5 + [0.0] * 3
    finally:
        manager.close()


def test_a_column_that_a_batch_does_not_carry_is_refused_at_the_start(dataset, config, tokenizer, user_file):
    """`question` is text and stays; a column of messages becomes `raw_prompt`."""
    config.reward.custom_reward_function.path = user_file("def compute_score(solution_str, messages): return 1.0\n")
    manager = create_reward_manager(config, tokenizer)
    try:
        with pytest.raises(
            RewardError, match=r"'messages'.*answer, index_in_file, level, question|'messages'.*question"
        ):
            manager.check(dataset)
    finally:
        manager.close()


TRL = """
def f(completions, ground_truth):
    return [float(c[0]["content"] == t) for c, t in zip(completions, ground_truth)]
"""


@pytest.mark.parametrize("where", ["reward_model", "ground_truth", None])
def test_a_ground_truth_that_nothing_provides_is_refused_at_the_start(
    where, config, tokenizer, make_batch, user_file, tmp_path, capsys
):
    """It may be in `reward_model` or in a column; a row without one is told, and gives None."""
    config.reward.custom_reward_function.path = user_file(TRL)
    truths = ["1", None] if where else [None, None]
    own = {"reward_model": lambda truth: {"style": "rule", "ground_truth": truth}, "ground_truth": lambda truth: truth}
    rows = [
        {"prompt": [{"role": "user", "content": "Sort: 1"}], **({where: own[where](truth)} if where else {"other": 1})}
        for truth in truths
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.data.shuffle, config.data.train_batch_size = False, 2
    dataset = create_rl_dataset(str(file), config.data, tokenizer)
    report_missing(dataset, "data.train_files")
    told = capsys.readouterr().err
    manager = create_reward_manager(config, tokenizer)
    try:
        if where is None:
            assert "no row has a ground truth" in told
            with raises_with(RewardError, "parameter 'ground_truth'", "columns: other"):
                manager.check(dataset)
            return
        assert "1 of 2 rows have no ground truth" in told and "line 2" in told
        manager.check(dataset)
        (prompts,) = create_train_loader(config.data, dataset)
        columns = {name: values.tolist() for name, values in prompts.non_tensor_batch.items()}
        assert manager(make_batch(["1", "1"], **columns)).sum(-1).tolist() == [1, 0]
        last = {name: values[1:] for name, values in columns.items()}
        assert manager(make_batch(["1"], **last)).sum(-1).tolist() == [0], "no row of the batch has one"
    finally:
        manager.close()


DEFAULTS = (
    'def compute_score(solution_str, ground_truth, level="all", index_in_file=None, hint="", tag=1): return 1.0\n'
)


def test_a_column_that_replaces_a_default_is_named(dataset, config, tokenizer, user_file, capsys):
    config.reward.custom_reward_function.path = user_file(DEFAULTS)
    manager = create_reward_manager(config, tokenizer)
    try:
        manager.check(dataset)
    finally:
        manager.close()
    notices = " ".join(capsys.readouterr().err.split())
    assert "its parameters 'level' get the columns" in notices
    assert "its parameters 'hint' keep their empty defaults" in notices


@pytest.mark.parametrize("text", ["None", "nan", " NaN ", "NaT", "<NA>"])
def test_missing_truths_that_were_written_as_text_are_named(text, tmp_path, config, tokenizer, capsys):
    config.data.prompt_key, config.data.ground_truth_key = "question", "answer"
    rows = [{"question": "1?", "answer": "1"}, {"question": "2?", "answer": text}, {"question": "3?", "answer": "nano"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report_missing(create_rl_dataset(str(tmp_path / "a.jsonl"), config.data, tokenizer), "data.train_files")
    warning = " ".join(capsys.readouterr().err.split())
    assert f"1 of 3 rows have {text.strip()!r} as ground truth" in warning and "line 2" in warning
