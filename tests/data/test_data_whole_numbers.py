"""Integers that pandas wrote as floats, because values are missing, are integers again in every kind of file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import datasets
import hypothesis.strategies as st
import pandas
import pytest
from hypothesis import HealthCheck, given, settings

from hybridrl.config.schema.data import DataConfig
from hybridrl.data import RLHFDataset
from hybridrl.data.data_files import read_table
from hybridrl.data.table import table_of


def written(frame: pandas.DataFrame, path: Path) -> Path:
    """Write a frame as pandas does."""
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    elif path.suffix == ".json":
        frame.to_json(path, orient="records")
    else:
        frame.to_csv(path, index=False)
    return path


NAN = math.nan
FILES = ["a.parquet", "a.jsonl", "a.json", "a.csv"]
#: the same rows in memory
IN_MEMORY = {
    "frame": lambda frame: frame,
    "records": lambda frame: frame.to_dict("records"),
    "dataset": lambda frame: datasets.Dataset.from_pandas(frame, preserve_index=False),
    "dataset of dicts": lambda frame: datasets.Dataset.from_list(frame.to_dict("records")),
}


def as_text(values: list[Any]) -> list[str | None]:
    return [None if value is None else str(value) for value in values]


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(numbers=st.lists(st.one_of(st.none(), st.integers(-(2**53), 2**53)), min_size=2, max_size=6))
def test_integers_next_to_missing_values_stay_integers(tmp_path: Path, name: str, numbers: list[int | None]) -> None:
    frame = pandas.DataFrame({"prompt": ["p"] * len(numbers), "answer": numbers})
    if any(number is not None for number in numbers):
        table = read_table(written(frame, tmp_path / name))
        assert as_text(table.column("answer")) == as_text(numbers)


@pytest.mark.parametrize("name", IN_MEMORY)
def test_rows_in_memory_too(name: str) -> None:
    frame = pandas.DataFrame({"prompt": ["p", "q", "r"], "answer": [1, None, 30]})
    assert as_text(table_of(IN_MEMORY[name](frame), "data").column("answer")) == ["1", None, "30"]


def nested() -> list[dict[str, Any]]:
    return [
        {"prompt": "p", "reward_model": {"ground_truth": 1.0}, "extra_info": {"index": 7.0, "x": {"label": 2.0}}},
        {
            "prompt": "q",
            "reward_model": {"ground_truth": math.nan},
            "extra_info": {"index": None, "x": {"label": None}},
        },
        {"prompt": "r", "reward_model": {"ground_truth": 12.0}, "extra_info": {"index": 9.0, "x": None}},
    ]


@pytest.mark.parametrize("name", ["parquet", "records"])
def test_integers_inside_objects(tmp_path: Path, name: str) -> None:
    table = table_of(nested(), "data")
    if name == "parquet":
        pandas.DataFrame(nested()).to_parquet(tmp_path / "a.parquet")
        table = read_table(tmp_path / "a.parquet")
    assert as_text([value["ground_truth"] for value in table.column("reward_model")]) == ["1", None, "12"]
    infos = table.column("extra_info")
    assert as_text([info["index"] for info in infos]) == ["7", None, "9"]
    assert str(infos[0]["x"]["label"]) == "2"
    assert infos[2]["x"] is None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("numbers", [[1.5, None, 2.0], [1.0, 2.0, 3.0], [2.0**60, None, 3.0], [None, None]])
def test_floats_that_may_be_meant_stay(tmp_path: Path, name: str, numbers: list[float | None]) -> None:
    frame = pandas.DataFrame({"prompt": ["p"] * len(numbers), "answer": pandas.Series(numbers, dtype="float64")})
    column = read_table(written(frame, tmp_path / name)).column("answer")
    assert [None if value is None else pytest.approx(float(value), rel=1e-9) for value in column] == numbers
    assert not any(isinstance(value, int) for value in column)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
@pytest.mark.parametrize("nested", [False, True])
def test_text_stays_as_it_was_written(tmp_path: Path, name: str, nested: bool) -> None:
    """A version "3.0" is no number; only CSV files write numbers as text."""
    texts = ["1.0", None, "3.0"]
    values = [{"v": text} for text in texts] if nested else texts
    column = read_table(written(pandas.DataFrame({"prompt": list("pqr"), "info": values}), tmp_path / name))
    assert column.column("info") == values


def test_text_of_rows_in_memory_stays() -> None:
    rows = [{"prompt": "p", "info": "1.0"}, {"prompt": "q", "info": None}]
    assert table_of(rows, "data").column("info") == ["1.0", None]


def test_what_changed_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = pandas.DataFrame({"prompt": ["p", "q"], "answer": [1, None], "score": [0.5, None]})
    path = written(frame, tmp_path / "a.parquet")
    read_table(path)
    lines = [line for line in capsys.readouterr().err.splitlines() if "'answer'" in line]
    assert len(lines) == 1
    assert str(path) in lines[0]
    assert "'score'" not in lines[0]


def test_a_reward_function_gets_the_integer(tmp_path: Path, tokenizer: Any) -> None:
    frame = pandas.DataFrame({"prompt": ["p", "q"], "answer": [42, None]})
    config = DataConfig(ground_truth_key="answer")
    dataset = RLHFDataset(written(frame, tmp_path / "a.parquet"), tokenizer, config)
    assert [dataset[item]["reward_model"]["ground_truth"] for item in range(2)] == [42, None]
    assert str(dataset[0]["reward_model"]["ground_truth"]) == "42"
