"""Rows of files of three kinds, and every way in which a file can be bad."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from raising import raises_with

from hybridrl.config.data_names import dataset_name
from hybridrl.data import DataError
from hybridrl.data.data_files import fingerprints, read_table
from hybridrl.data.table import table_of


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
    write("a.parquet", rows)
    refused(tmp_path, "is a directory", f"data.val_files={tmp_path / '*.parquet'}")


def test_unknown_suffix(tmp_path):
    for name in ("a.xls", "b.xls.gz", "c.parquet.gz"):
        (tmp_path / name).write_text("x\n1\n")
        refused(tmp_path / name, (tmp_path / name).suffix, ".parquet, .json, .jsonl, .csv")


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
    with raises_with(DataError, "'question'", "data_source", "data.prompt_key"):
        read_table(path).require("question", "data.prompt_key")


def test_home_directory_is_expanded(write, rows, monkeypatch):
    path = write("a.parquet", rows)
    monkeypatch.setenv("HOME", str(path.parent))
    assert len(read_table(Path("~/a.parquet"))) == 7


def every_row(table):
    return [table[index] for index in range(len(table))]


def zstd(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_files(write, rows, tmp_path, suffix):
    content = write("a.jsonl", rows).read_bytes()
    path = tmp_path / f"b.jsonl{suffix}"
    path.write_bytes(PACK[suffix](content))
    table = read_table(path)
    assert every_row(table) == rows and table.locate(3).endswith("line 4")
    path.write_bytes(PACK[suffix](content)[:-6])
    refused(path, str(path), f"cannot be decompressed as {suffix}")


def test_csv_values_stay_text_and_rows_are_named_by_their_first_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('\ufeffquestion, answer\r\n"two\nlines, ""quoted""",007\r\n\r\nlast,\r\n', encoding="utf-8")
    table = read_table(path)
    assert every_row(table) == [
        {"question": 'two\nlines, "quoted"', "answer": "007"},
        {"question": "last", "answer": None},
    ]
    assert [table.locate(row).rsplit("line ")[-1] for row in range(2)] == ["2", "5"]


def test_tabs_and_long_fields(tmp_path):
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(gzip.compress(b"q\ta\n" + b"x" * 200_000 + b"\t1,2\n"))
    assert every_row(read_table(path)) == [{"q": "x" * 200_000, "a": "1,2"}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("q,a\nx,1\ny,1,2\n", ("line 3", "3 fields", "2 columns (q, a)")),
        ('q,a\nx,1\n"open,1\n', ("line 3", "not valid CSV")),
        ("q,,a\nx,1,2\n", ("line 1", "every column once")),
        ("q,q\nx,1\n", ("line 1", "every column once")),
        ("q,a\n", ("no rows",)),
    ],
)
def test_bad_csv_is_named(tmp_path, text, said):
    (tmp_path / "a.csv").write_text(text)
    refused(tmp_path / "a.csv", *said)


def test_globs_are_read_in_the_order_of_their_names(write, rows, tmp_path):
    (tmp_path / "deep").mkdir()
    write("b.jsonl", rows[2:4])
    write("a.parquet", rows[:2])
    write("deep/c.json", rows[4:])
    write("x [1].json", rows[:1])
    assert every_row(read_table(str(tmp_path / "[ab].*"))) == rows[:4]
    assert every_row(read_table([str(tmp_path / "?.*"), str(tmp_path / "**" / "c.json")])) == rows
    assert every_row(read_table(str(tmp_path / "x [1].json"))) == rows[:1]  # a file of exactly this name
    refused(str(tmp_path / "*.csv"), "*.csv", "no such file")


def test_names_of_data_sets_and_of_files(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a:b").write_text("")
    monkeypatch.chdir(tmp_path)
    parts = {
        "openai/gsm8k": ("openai/gsm8k", None, None),
        "openai/gsm8k:train": ("openai/gsm8k", None, "train"),
        "openai/gsm8k@main:train[:10%]": ("openai/gsm8k", "main", "train[:10%]"),
        "org/set-v1.5": ("org/set-v1.5", None, None),
        "data:train": ("data", None, "train"),
        "data/none:train": ("data/none", None, "train"),
    }
    for entry, (name, config, split) in parts.items():
        found = dataset_name(entry)
        assert found is not None and (found.name, found.config, found.split) == (name, config, split)
    for entry in (
        "data",
        "data/a:b",
        "data/none.parquet",
        "data/none.csv.gz",
        "data/none",
        "a.json",
        "x/y/z",
        "s3://x/y:train",
    ):
        assert dataset_name(entry) is None, entry


@pytest.fixture
def hub(tmp_path, monkeypatch, write, rows):
    """A folder `org/name` as the hub stores it: the `datasets` library loads it as it loads one of the hub."""
    (tmp_path / "org" / "name").mkdir(parents=True)
    write("org/name/train.parquet", rows[:5])
    write("org/name/test.parquet", rows[5:])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("hub")
def test_splits_that_the_datasets_library_loads(rows):
    table = read_table(["org/name:train", "org/name@default:test"])
    assert every_row(table) == rows
    assert table.locate(6) == "org/name@default:test, row 1 (counted from 0)"
    refused("org/name:dev", "org/name:dev", "dev")
    refused("org/name@other:test", "other")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_texts_in_a_folder_are_read_by_the_rules_of_files(tmp_path, monkeypatch, suffix):
    """The `datasets` library would read 007 as 7, and one of two values with the same name."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def folder(name: str, **files: str) -> str:
        (tmp_path / name).mkdir()
        kind = name.partition("_")[0]
        for split, text in files.items():
            data = gzip.compress(text.encode()) if suffix else text.encode()
            (tmp_path / name / f"{split}.{kind}{suffix}").write_bytes(data)
        return str(tmp_path / name)

    codes = folder("csv_codes", train="prompt,code\nx,007\ny,\n", test="prompt,code\nz,1\n")
    assert every_row(read_table(f"{codes}:train")) == [{"prompt": "x", "code": "007"}, {"prompt": "y", "code": None}]
    assert every_row(read_table(f"{codes}:test")) == [{"prompt": "z", "code": "1"}]
    refused(f"{codes}:dev", "train, test")
    refused(f"{codes}:train[:1]", "train, test")
    twice = folder("jsonl_twice", train='{"prompt": "x", "extra_info": {"a": 1, "a": 2}}\n')
    refused(f"{twice}:train", "'a'", "line 1")
    infinite = folder("jsonl_infinite", train='{"prompt": "x", "n": 1}\n{"prompt": "x", "n": Infinity}\n')
    refused(f"{infinite}:train", "Infinity", "line 2")


def test_saved_data_sets(tmp_path, rows):
    train, test = datasets.Dataset.from_list(rows[:5]), datasets.Dataset.from_list(rows[5:])
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "both")
    train.save_to_disk(tmp_path / "one")
    assert every_row(read_table([f"{tmp_path}/one", f"{tmp_path}/both:test"])) == rows
    refused(str(tmp_path / "both"), "splits train, test", f"{tmp_path}/both:train")
    refused(f"{tmp_path}/both:dev", "no such split", "train, test")
    refused(f"{tmp_path}/one:test", "test")
    refused(f"{tmp_path}/both@main:test", "@main")


def test_a_hub_that_cannot_be_reached(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("org/unknown:train", "data.val_files=org/unknown:train", "no such file", "--repo-type dataset org/unknown")


@pytest.mark.usefixtures("hub")
def test_a_fingerprint_follows_the_content(write, rows):
    path = write("a.jsonl", rows)
    first = fingerprints([str(path), "org/name:test"])
    assert [name for name, _ in first] == ["a.jsonl", "org/name:test"]
    assert fingerprints([f"{path.parent}/a.*", "org/name:test"]) == first
    write("a.jsonl", rows[:3])
    write("org/name/test.parquet", rows[:3])
    again = fingerprints([str(path), "org/name:test"])
    assert all(was != now for was, now in zip(first, again, strict=True))


def test_a_space_after_the_commas_of_a_csv_is_no_part_of_values(tmp_path: Path) -> None:
    """The names lost it, and the values kept it, so an answer was ' 3'."""
    (tmp_path / "a.csv").write_text('prompt, answer\n"q, 1", "3, or 4"\nr, 5 \n', encoding="utf-8")
    assert read_table(tmp_path / "a.csv").column("answer") == ["3, or 4", "5 "]
    (tmp_path / "b.csv").write_text("prompt,answer\nq, 3\n", encoding="utf-8")
    assert read_table(tmp_path / "b.csv").column("answer") == [" 3"]


@pytest.mark.parametrize(
    ("text", "place", "name"),
    [
        ('{"prompt": "x", "answer": "1"}\n{"prompt": "y", "answer": "1", "answer": "2"}\n', "line 2", "answer"),
        ('{"prompt": [{"role": "user", "content": "A", "content": "B"}]}', "line 1", "content"),
        ('[{"prompt": "x"},\n{"a": {"b": 1, "b": 1}}]', "a.jsonl", "b"),
    ],
)
def test_a_name_that_an_object_has_twice_is_refused(tmp_path: Path, text: str, place: str, name: str) -> None:
    """Python takes the last value, so that the first was lost."""
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_table(path)
    assert str(path) in str(caught.value) and place in str(caught.value) and repr(name) in str(caught.value)


@pytest.mark.parametrize("kind", [pyarrow.float16(), pyarrow.float32()])
def test_numbers_of_few_bits_are_what_somebody_wrote(tmp_path: Path, kind: pyarrow.DataType) -> None:
    """0.1 of 32 bits is 0.10000000149011612 of 64, which no answer equals."""
    numpy_kind = kind.to_pandas_dtype()
    values = [0.1, -2.5, None, 1e-7, 3.14, 1024.0]
    numbers = pyarrow.array([None if value is None else numpy_kind(value) for value in values], kind)
    truth = pyarrow.StructArray.from_arrays([numbers], ["ground_truth"])
    lists = pyarrow.array([[numpy_kind(0.1)]] * 6, pyarrow.list_(kind))
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"answer": numbers, "reward_model": truth, "lists": lists}), path)
    shortest = [None if value is None else float(str(numpy_kind(value))) for value in values]
    table = read_table(path)
    assert table.column("answer") == shortest and shortest[0] == 0.1
    assert [row["ground_truth"] for row in table.column("reward_model")] == shortest
    assert [table[n]["answer"] for n in range(6)] == shortest
    assert table.with_ground_truth("answer")[0]["reward_model"]["ground_truth"] == 0.1
    assert table[0]["lists"] == [float(numpy_kind(0.1))]  # pixels and embeddings stay as they are


def rows(file):
    table = read_table(file)
    return [table[index] for index in range(len(table))]


def test_semicolons_of_a_spreadsheet(tmp_path):
    """A comma in a name of a column, or in the text of a file with commas, changes nothing."""
    (tmp_path / "a.csv").write_text("prompt;answer\n2,5 + 1;3,5\n")
    assert rows(tmp_path / "a.csv") == [{"prompt": "2,5 + 1", "answer": "3,5"}]
    (tmp_path / "b.csv").write_text("prompt,answer\na;b,c\n")
    assert rows(tmp_path / "b.csv") == [{"prompt": "a;b", "answer": "c"}]
    (tmp_path / "c.xlsx").write_bytes(b"x")
    with pytest.raises(DataError) as caught:
        read_table(tmp_path / "c.xlsx")
    assert "read_excel" in str(caught.value)


@pytest.mark.parametrize(
    "kind",
    [pyarrow.list_(pyarrow.float32()), pyarrow.large_list(pyarrow.float16()), pyarrow.list_(pyarrow.float32(), 2)],
)
def test_lists_of_ground_truths_are_what_somebody_wrote(tmp_path: Path, kind: pyarrow.DataType) -> None:
    number = kind.value_type.to_pandas_dtype()
    missing = [1.0, 0.3] if isinstance(kind, pyarrow.FixedSizeListType) else None  # Parquet cannot store it there
    pairs = [[0.1, 3.14], missing, [2.5, -0.7]]
    stored = pyarrow.array([None if pair is None else [number(item) for item in pair] for pair in pairs], kind)
    info = pyarrow.StructArray.from_arrays([stored], ["bounds"])
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"answer": stored, "ground_truth": stored, "extra_info": info}), path)
    table = read_table(path)
    assert table.column("ground_truth") == pairs
    assert [row["bounds"] for row in table.column("extra_info")] == pairs
    truths = table.with_ground_truth("answer")
    assert [truths[index]["reward_model"]["ground_truth"] for index in range(3)] == pairs
    nested = pyarrow.array([[[number(0.1)], []], []], pyarrow.list_(pyarrow.list_(kind.value_type)))
    pyarrow.parquet.write_table(pyarrow.table({"ground_truth": nested.slice(0)}), path)
    assert read_table(path).column("ground_truth") == [[[0.1], []], []]


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.map_(pyarrow.string(), pyarrow.float32()),
        pyarrow.list_view(pyarrow.float32()),
        pyarrow.large_list_view(pyarrow.float32()),
        pyarrow.list_(pyarrow.struct([("x", pyarrow.float32()), ("xs", pyarrow.list_(pyarrow.float32()))])),
    ],
    ids=str,
)
def test_numbers_of_few_bits_in_any_nesting(kind: pyarrow.DataType) -> None:
    """Arguments of calls are objects in lists of messages, and 0.10000000149011612 would be learnt of them."""
    if pyarrow.types.is_map(kind):
        values: list = [[("a", 0.1)], None, [], [("b", 0.2), ("c", None)]]
    elif pyarrow.types.is_list(kind):
        values = [[{"x": 0.1, "xs": [0.2]}], None, [], [None, {"x": None, "xs": None}]]
    else:
        values = [[0.1], None, [], [0.2, None]]
    name = "messages" if pyarrow.types.is_list(kind) else "ground_truth"
    table = table_of(pyarrow.table({name: pyarrow.array(values, kind)}).slice(1), "data")
    assert table.column(name) == values[1:]
    table = table_of(pyarrow.table({name: pyarrow.array(values, kind)}), "data")
    assert table.column(name) == values and table[0][name] == values[0]
    sounds = pyarrow.list_(
        pyarrow.struct([("array", pyarrow.list_(pyarrow.float32())), ("sampling_rate", pyarrow.int32())])
    )
    stored = pyarrow.table({"sounds": pyarrow.array([[{"array": [0.5], "sampling_rate": 1}]], sounds)})
    assert table_of(stored, "data").arrow().schema == stored.schema, "media stay"


def test_a_field_that_objects_have_twice_is_named() -> None:
    twice = pyarrow.StructArray.from_arrays([pyarrow.array([1]), pyarrow.array([2])], ["a", "a"])
    lists = pyarrow.ListArray.from_arrays([0, 1], twice)
    for column in (twice, lists):
        with raises_with(DataError, "'extra_info'", "'a'"):
            table_of(pyarrow.table({"extra_info": column}), "data")


@pytest.mark.parametrize("suffix", [".bz2", ".xz"])
def test_a_second_stream_that_is_damaged_is_not_left_out(write, rows, tmp_path, suffix) -> None:
    """The standard library ends with the first stream, as if there were no other rows."""
    content = PACK[suffix](write("a.jsonl", rows).read_bytes())
    path = tmp_path / f"b.jsonl{suffix}"
    path.write_bytes(content + content)
    assert every_row(read_table(path)) == rows * 2
    path.write_bytes(content + b"\0" * 8)
    assert every_row(read_table(path)) == rows
    for damaged in (b"XXXX" + content[4:], content[:-6]):
        path.write_bytes(content + damaged)
        refused(path, str(path), f"cannot be decompressed as {suffix}")


@pytest.mark.parametrize("line", ["prompt,answer", "\ufeffprompt,answer", "\ufeffc,3", " prompt , answer"])
def test_files_that_were_joined_are_refused_by_line(tmp_path, line) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"prompt,answer\na,1\nb,2\n{line}\nc,3\n", encoding="utf-8")
    refused(path, str(path), "line 4")


@pytest.mark.parametrize("written", ["1e400", "-1e999", "Infinity", "-Infinity"])
@pytest.mark.parametrize(
    ("row", "place"),
    [
        ('{"prompt": "a", "reward_model": {"ground_truth": %s}}', "reward_model.ground_truth"),
        ('{"prompt": "a", "extra_info": {"scores": [1.0, %s]}}', "extra_info.scores[1]"),
        ('{"prompt": [{"role": "user", "content": "a", "weight": %s}]}', "prompt[0].weight"),
        (
            '{"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f", "arguments": {"x": %s}}}]}]}',
            "messages[0].tool_calls[0].function.arguments.x",
        ),
        ('{"chosen": "a", "rejected": "b", "margin": %s}', "margin"),
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "list.json", "rows.jsonl.gz"])
def test_numbers_that_json_cannot_hold_are_refused_by_their_place(
    tmp_path: Path, written: str, row: str, place: str, name: str
) -> None:
    path = tmp_path / name
    text = (
        f'{{"prompt": "fine"}}\n{row % written}\n' if name != "list.json" else f'[{{"prompt": "b"}}, {row % written}]'
    )
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    with raises_with(DataError, str(path), f"{'[1].' if name == 'list.json' else ''}{place}", written):
        read_table(path)


def test_numbers_of_any_size_that_can_be_read_stay(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1.7e308, "b": 5e-324, "c": 1e-400, "d": 123456789012345678901234567890, "e": "NaN"}\n')
    row = read_table(path)[0]
    assert row == {"a": 1.7e308, "b": 5e-324, "c": 0.0, "d": 123456789012345678901234567890, "e": "NaN"}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "list.json"])
def test_nan_is_a_missing_value_and_is_said(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ['{"prompt": "a"}', '{"prompt": "b", "answer": NaN, "extra_info": {"x": [1.5, NaN]}}', '{"prompt": "c"}']
    path = tmp_path / name
    path.write_text(f"[{', '.join(rows)}]" if name == "list.json" else "\n".join(rows))
    table = read_table(path)
    assert table[1] == {"prompt": "b", "answer": None, "extra_info": {"x": [1.5, None]}}
    lines = [line for line in capsys.readouterr().err.splitlines() if "NaN" in line]
    assert len(lines) == 1
    assert str(path) in lines[0]
    assert "2 times" in lines[0]
    assert ("line 2" in lines[0]) == (name != "list.json")


def test_an_infinite_number_is_named_behind_nan(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": NaN, "b": {"c": [1e999]}}\n')
    with raises_with(DataError, "line 1", "b.c[0]", "1e999"):
        read_table(path)
