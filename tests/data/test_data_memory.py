"""Rows handed over in Python: what a run reads is what was given, under a name that a resumed run finds."""

from __future__ import annotations

import datasets
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from raising import raises_with

from hybridrl.config import DataConfig
from hybridrl.data import DataError, create_rl_dataset, save_rows
from hybridrl.data.data_files import read_table

#: no single type holds these columns, and parquet would add the missing keys of `info` as None
MIXED = [
    {"prompt": "a", "answer": 1, "info": {"x": 1}, "tags": []},
    {"prompt": "b\ud800", "answer": "1", "info": {"y": [None, 1.5, True]}, "tags": ["z"]},
    {"prompt": "c", "answer": None, "info": {}, "more": "only here", "tags": [[1], "mixed"]},
]


def read(path):
    table = read_table(path)
    return [table[index] for index in range(len(table))]


def test_a_list_of_dicts_is_read_back_unchanged(tmp_path):
    found = read(save_rows(MIXED, tmp_path))
    assert [{k: row[k] for k in given} for row, given in zip(found, MIXED, strict=True)] == MIXED
    assert [type(row["answer"]) for row in found] == [int, str, type(None)]
    assert [row["more"] for row in found] == [None, None, "only here"]


def test_datasets_and_data_frames_are_read_back_unchanged(tmp_path, rows):
    dataset = datasets.Dataset.from_list(rows)
    assert read(save_rows(dataset, tmp_path)) == rows
    assert read(save_rows(pandas.DataFrame(rows), tmp_path)) == rows
    chosen = dataset.filter(lambda row: row["extra_info"]["index"] % 2 == 0).shuffle(seed=1)
    assert read(save_rows(chosen, tmp_path)) == list(chosen)


def test_the_same_rows_are_the_same_file_and_other_rows_another(tmp_path, rows):
    dataset = datasets.Dataset.from_list(rows)
    for given in (rows, dataset):
        first = save_rows(given, tmp_path / "new", "val")
        time = first.stat().st_mtime_ns
        assert save_rows(given, tmp_path / "new", "val") == first and first.stat().st_mtime_ns == time
        assert first.name.startswith("val-")
    assert save_rows(dataset.select(range(7)), tmp_path) == save_rows(dataset, tmp_path)
    assert save_rows(rows[:6], tmp_path) != save_rows(rows, tmp_path)
    assert save_rows(dataset.select(range(6)), tmp_path) != save_rows(dataset, tmp_path)


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, float("nan"), {1, 2}, b"x", object()])
def test_a_value_that_would_change_is_named(tmp_path, value):
    with raises_with(DataError, "item 1", "'answer'", f"holds {type(value).__name__}"):
        save_rows([{"answer": 1}, {"answer": value}], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_rows_of_another_type_are_named(tmp_path, rows):
    part = datasets.Dataset.from_list(rows)
    both = datasets.DatasetDict(train=part, test=part)
    for given, said in ((both, "DatasetDict with the keys train"), (7, "int"), (["a", 1], "in it")):
        with pytest.raises(DataError, match=said):
            save_rows(given, tmp_path)
    with pytest.raises(DataError, match="no rows"):
        save_rows([], tmp_path)


def test_a_run_reads_them(tmp_path, rows, tokenizer):
    path = save_rows(datasets.Dataset.from_list(rows), tmp_path)
    dataset = create_rl_dataset([str(path)], DataConfig(shuffle=False), tokenizer)
    assert [dataset[i]["reward_model"] for i in range(7)] == [row["reward_model"] for row in rows]


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["answer", "answer"])
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path)
    frame = pandas.DataFrame([[1, 2]], columns=["answer", "answer"])
    for read in (lambda: save_rows(frame, tmp_path), lambda: save_rows(table, tmp_path), lambda: read_table(path)):
        with raises_with(DataError, "'answer'"):
            read()
