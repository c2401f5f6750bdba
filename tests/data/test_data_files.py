"""Rows of files of three kinds, and every way in which a file can be bad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridrl.data import DataError
from hybridrl.data.files import read_table


@pytest.mark.parametrize("name", ["a.parquet", "a.json", "a.jsonl"])
def test_every_kind_of_file_gives_the_same_rows(write, rows, name):
    table = read_table(write(name, rows))
    assert [table[i] for i in range(len(table))] == rows
    assert table.column("reward_model") == [row["reward_model"] for row in rows]


def test_several_files_are_one_table_and_rows_keep_their_address(write, rows):
    first, second = write("a.parquet", rows[:3]), write("b.jsonl", rows[3:])
    table = read_table([first, second])
    assert [table[i] for i in range(7)] == rows
    assert str(first) in table.locate(2) and "row 2" in table.locate(2)
    assert str(second) in table.locate(3) and "line 1" in table.locate(3)
    with pytest.raises(IndexError):
        table[7]


def test_a_column_that_one_file_lacks_is_none_there(write):
    table = read_table([write("a.parquet", [{"x": 1}]), write("b.parquet", [{"y": 2}])])
    assert [table[0], table[1]] == [{"x": 1, "y": None}, {"x": None, "y": 2}]
    assert table.column("y") == [None, 2]


def test_blank_lines_do_not_shift_line_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n\n{"x": 2}\n')
    table = read_table(path)
    assert table.column("x") == [1, 2] and table.locate(1).endswith("line 3")


def refused(path, *parts: str) -> None:
    with pytest.raises(DataError) as caught:
        read_table(path, "data.val_files")
    for part in ("data.val_files", *parts):
        assert part in str(caught.value)


def test_missing_file(tmp_path):
    refused(tmp_path / "none.parquet", "none.parquet", "no such file")


def test_no_file_named():
    refused([], "names no file")


def test_directory_tells_to_name_its_files(write, rows, tmp_path):
    path = write("a.parquet", rows)
    refused(tmp_path, "is a directory", f"data.val_files=[{path}]")


def test_unknown_suffix(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x\n1\n")
    refused(path, ".csv", ".parquet, .json, .jsonl")


def test_remote_address():
    refused("s3://bucket/a.parquet", "only local files")


def test_file_of_no_bytes(tmp_path):
    path = tmp_path / "a.parquet"
    path.touch()
    refused(path, "0 bytes")


def test_damaged_parquet(write, rows):
    path = write("a.parquet", rows)
    path.write_bytes(path.read_bytes()[:-20])
    refused(path, str(path), "cannot be read as parquet")


def test_parquet_without_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    refused(path, "no rows")


def test_broken_json_line_is_named(write, rows):
    path = write("a.jsonl", rows)
    lines = path.read_text().splitlines()
    lines[4] = lines[4][:20]
    path.write_text("\n".join(lines))
    refused(path, "line 5", "not valid JSON")


def test_broken_json_list_is_named(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"x": 1},\n{"x": }]')
    refused(path, "line 2", "not valid JSON")


def test_row_that_is_no_object(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"x": 1}) + "\n[1]\n")
    refused(path, "line 2", "list")


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": "\xff"}\n')
    refused(path, "UTF-8")


def test_missing_column_lists_those_found(write, rows):
    path = write("a.parquet", rows)
    with pytest.raises(DataError, match=r"no column 'question' \(columns found: data_source, prompt,.*data.prompt_key"):
        read_table(path).require("question", "data.prompt_key")


def test_home_directory_is_expanded(write, rows, monkeypatch):
    path = write("a.parquet", rows)
    monkeypatch.setenv("HOME", str(path.parent))
    assert len(read_table(Path("~/a.parquet"))) == 7
