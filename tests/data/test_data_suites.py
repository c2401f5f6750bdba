"""Benchmark suites: rows of published files become prompts with references, and files that are none are refused."""

from __future__ import annotations

import base64
import csv
import json
import pickle
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from raising import raises_with

from hybridrl.config import PPOTrainerConfig, load_config, validate
from hybridrl.config.places import absolute_value
from hybridrl.data.data_files import contents, fingerprints, read_table
from hybridrl.data.suites import SuiteRow, register_suite
from hybridrl.errors import ConfigError, DataError
from hybridrl.registry import SUITES

GSM8K = {"question": "How many are 3 and 4?", "answer": "3 + 4 = <<3+4=7>>7\n#### 1,007"}
MATH500 = {"problem": "What is $1/2$?", "solution": "\\boxed{\\frac12}", "answer": "\\frac12", "subject": "Algebra"}
AIME24 = {"id": 60, "problem": "Find $m+n$.", "solution": "", "answer": "025", "url": "", "year": 2024}
GPQA = {
    "Record ID": "rec1",
    "Question": "Which, of these,\nis it?",
    "Correct Answer": "this one\n",
    "Incorrect Answer 1": "that",
    "Incorrect Answer 2": "those",
    "Incorrect Answer 3": "none",
}


def write_lines(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def write_csv(file: Path, rows: list[dict[str, Any]]) -> Path:
    with open(file, "w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


def rows_of(entry: str) -> list[dict[str, Any]]:
    table = read_table(entry)
    return [table[number] for number in range(len(table))]


@pytest.mark.parametrize(
    ("suite", "row", "words", "truth"),
    [
        ("gsm8k", GSM8K, ("How many are 3 and 4?", "####"), "1007"),
        ("math500", {**MATH500, "unique_id": "test/7"}, ("What is $1/2$?", "\\boxed{}"), "\\frac12"),
        ("aime24", AIME24, ("Find $m+n$.", "\\boxed{}"), "25"),
        ("aime25", {"problem": "Find $m$.", "answer": 7}, ("Find $m$.", "\\boxed{}"), "7"),
        ("aime25", {"question": "Find $m$.", "answer": "588"}, ("Find $m$.", "\\boxed{}"), "588"),
        ("aime24", {"ID": "2024-I-1", "Problem": "Find it.", "Answer": 204}, ("Find it.",), "204"),
    ],
)
def test_a_published_row_becomes_a_prompt_with_its_reference(
    suite: str, row: dict[str, Any], words: tuple[str, ...], truth: str, tmp_path: Path
) -> None:
    (made,) = rows_of(f"suite:{suite}@{write_lines(tmp_path / 'rows.jsonl', [row])}")
    (message,) = made["prompt"]
    assert message["role"] == "user" and all(word in message["content"] for word in words)
    assert made["data_source"] == suite and made["reward_model"] == {"style": "rule", "ground_truth": truth}
    assert made["extra_info"]["suite"] == suite and made["extra_info"]["index"] == 0
    names = [str(row[name]) for name in ("unique_id", "id", "ID") if name in row]
    assert made["extra_info"]["id"] == (names or ["0"])[0]


def test_choices_are_shuffled_by_their_question_alone(tmp_path: Path) -> None:
    many = [{**GPQA, "Question": f"Question {number}?"} for number in range(200)]
    first = rows_of(f"suite:gpqa@{write_csv(tmp_path / 'gpqa_diamond.csv', many)}")
    again = rows_of(f"suite:gpqa@{write_csv(tmp_path / 'other.csv', many[::-1])}")
    assert [row["prompt"] for row in first] == [row["prompt"] for row in again[::-1]]
    letters = Counter(row["reward_model"]["ground_truth"] for row in first)
    assert set(letters) == set("ABCD") and max(letters.values()) < 80  # 50 each but for chance: 4 sigma are 25
    for row in first:
        lines = row["prompt"][0]["content"].splitlines()
        assert f"{row['reward_model']['ground_truth']}) this one" in lines
        assert sorted(line[3:] for line in lines if line[1:3] == ") ") == ["none", "that", "this one", "those"]


@pytest.mark.parametrize(
    "name", ["gsm8k.jsonl", "gsm8k/test.jsonl", "gsm8k/main/test-00000-of-00001.parquet", "test.jsonl", "gsm8k.json.gz"]
)
def test_a_folder_holds_copies_under_their_own_names_or_the_hubs(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pd.DataFrame([GSM8K]).to_parquet(file)
    elif file.suffix == ".gz":
        pd.DataFrame([GSM8K]).to_json(file, orient="records")
    else:
        write_lines(file, [GSM8K])
    assert len(rows_of(f"suite:gsm8k@{tmp_path}")) == 1
    assert rows_of(f"suite:gsm8k@{tmp_path}") == rows_of(f"suite:gsm8k@{file}")


def test_faults_of_files_name_the_suite_the_file_and_what_it_has(tmp_path: Path) -> None:
    with raises_with(DataError, "gsm8k", "'answer'", "rows.jsonl", "question"):
        read_table(f"suite:gsm8k@{write_lines(tmp_path / 'rows.jsonl', [{'question': 'x'}])}")
    (tmp_path / "empty.jsonl").touch()
    with raises_with(DataError, "empty.jsonl", "empty"):
        read_table(f"suite:gsm8k@{tmp_path / 'empty.jsonl'}")
    with raises_with(DataError, "suite:aime24", "aime24.jsonl", "empty.jsonl"):
        read_table(f"suite:aime24@{tmp_path}")
    with raises_with(DataError, "nosuite", "gsm8k", "register_suite"):
        read_table("suite:nosuite")
    with raises_with(DataError, "line 2", "####"):
        read_table(f"suite:gsm8k@{write_lines(tmp_path / 'r.jsonl', [GSM8K, {**GSM8K, 'answer': '7'}])}")
    with raises_with(DataError, "aime24", "'1025'", 999):
        read_table(f"suite:aime24@{write_lines(tmp_path / 'a.jsonl', [{**AIME24, 'answer': '1025'}])}")
    with raises_with(DataError, "Incorrect Answer 2"):
        read_table(f"suite:gpqa@{write_csv(tmp_path / 'g.csv', [{**GPQA, 'Incorrect Answer 2': ''}])}")


def test_several_suites_are_one_table_and_have_digests_of_their_rows(tmp_path: Path) -> None:
    write_lines(tmp_path / "gsm8k.jsonl", [GSM8K])
    write_lines(tmp_path / "aime24.jsonl", [AIME24, AIME24])
    entries = [f"suite:gsm8k@{tmp_path}", f"suite:aime24@{tmp_path}"]
    table = read_table(entries)
    assert [row["suite"] for row in table.column("extra_info")] == ["gsm8k", "aime24", "aime24"]
    assert table.arrow().num_rows == 3
    before = fingerprints(entries), contents(entries)
    write_lines(tmp_path / "aime24.jsonl", [AIME24, {**AIME24, "answer": "1"}])
    after = fingerprints(entries), contents(entries)
    assert [old[0] == new[0] for old, new in zip(before, after, strict=True)] == [True, True]
    assert [old[1] == new[1] for old, new in zip(before, after, strict=True)] == [False, False]


def test_a_run_refuses_unknown_suites_and_places_before_it_starts(tmp_path: Path) -> None:
    write_lines(tmp_path / "gsm8k.jsonl", [GSM8K])

    def validated(entry: str) -> None:
        words = [f"data.val_files=['{entry}']", f"data.train_files={tmp_path / 'gsm8k.jsonl'}"]
        validate(load_config("ppo_trainer", [*words, f"actor_rollout_ref.model.path={tmp_path}"]))

    validated(f"suite:gsm8k@{tmp_path}")
    validated("suite:gsm8k")
    with raises_with(ConfigError, "data.val_files", "gms8k", "gsm8k", "math500"):
        validated("suite:gms8k")
    with raises_with(ConfigError, "data.val_files", "nowhere"):
        validated("suite:gsm8k@nowhere/at/all")


def test_a_suite_of_ones_own_is_registered_under_a_name(tmp_path: Path) -> None:
    @register_suite("cities", columns=("city|town",), licence="none")
    def cities(row: dict[str, Any], where: str) -> SuiteRow:
        return SuiteRow(f"Name the country of {row['city']}.", "France", data_source="gsm8k", extra={"more": "x"})

    try:
        (row,) = rows_of(f"suite:cities@{write_lines(tmp_path / 'rows.jsonl', [{'town': 'Paris'}])}")
        assert row["prompt"][0]["content"] == "Name the country of Paris." and row["data_source"] == "gsm8k"
        assert row["extra_info"] == {"more": "x", "suite": "cities", "index": 0, "id": "0"}
        with raises_with(DataError, "cities", "suite:cities@FILE_OR_FOLDER"):
            read_table("suite:cities")
    finally:
        SUITES.remove("cities")


def test_every_suite_says_where_its_data_are_from() -> None:
    for name in SUITES.names():
        metadata = SUITES.metadata(name)
        assert metadata.licence and metadata.sampling and metadata.columns, name


def test_the_place_of_a_suite_is_made_absolute_where_settings_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "copies" / "gsm8k.jsonl", [GSM8K])
    stored = absolute_value(PPOTrainerConfig, "data.val_files", ["suite:gsm8k@copies", "suite:gsm8k"])
    assert stored == [f"suite:gsm8k@{tmp_path / 'copies'}", "suite:gsm8k"]


# ------------------------------------------------------------------ programs

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def one():\n    """Return 1."""\n',
    "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
    "entry_point": "one",
}
CASE = {"input": "1\n2\n", "output": "3\n", "testtype": "stdin"}
CALL = {"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}
LIVECODEBENCH = {
    "question_title": "Sums",
    "question_content": "Add two numbers.",
    "platform": "atcoder",
    "question_id": "abc300_a",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([CASE]),
    "private_test_cases": json.dumps([{**CASE, "input": "2\n2\n", "output": "4\n"}]),
    "metadata": "{}",
}


def packed(value: Any, protocol: int = 4) -> str:
    """A value as the published files have private test cases."""
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


def test_humaneval_asks_for_the_function_and_keeps_its_check(tmp_path: Path) -> None:
    (row,) = rows_of(f"suite:humaneval@{write_lines(tmp_path / 'HumanEval.jsonl', [HUMANEVAL])}")
    assert HUMANEVAL["prompt"] in row["prompt"][0]["content"] and row["extra_info"]["id"] == "HumanEval/0"
    truth = json.loads(row["reward_model"]["ground_truth"])
    assert truth == {name: HUMANEVAL[name] for name in ("prompt", "test", "entry_point")}
    with raises_with(DataError, "'test'", "'check'"):
        read_table(f"suite:humaneval@{write_lines(tmp_path / 'b.jsonl', [{**HUMANEVAL, 'test': 'assert 1'}])}")


@pytest.mark.parametrize("protocol", range(6))
def test_livecodebench_reads_private_cases_in_both_forms(protocol: int, tmp_path: Path) -> None:
    private = [{**CASE, "input": "é\n" * 300, "output": str(number)} for number in range(3)]
    hidden = {**LIVECODEBENCH, "private_test_cases": packed(json.dumps(private, ensure_ascii=False), protocol)}
    plain, coded = rows_of(f"suite:livecodebench@{write_lines(tmp_path / 'test.jsonl', [LIVECODEBENCH, hidden])}")
    truth = json.loads(plain["reward_model"]["ground_truth"])
    assert truth == {"inputs": ["1\n2\n", "2\n2\n"], "outputs": ["3\n", "4\n"]}
    assert json.loads(coded["reward_model"]["ground_truth"])["outputs"] == ["3\n", "0", "1", "2"]


def test_livecodebench_calls_functions_by_the_name_in_the_metadata(tmp_path: Path) -> None:
    row = {
        **LIVECODEBENCH,
        "starter_code": "class Solution:\n    def total(self, values, more):",
        "public_test_cases": json.dumps([CALL]),
        "private_test_cases": packed(json.dumps([CALL])),
        "metadata": json.dumps({"func_name": "total"}),
    }
    (read,) = rows_of(f"suite:livecodebench@{write_lines(tmp_path / 'a.jsonl', [row])}")
    assert json.loads(read["reward_model"]["ground_truth"])["fn_name"] == "total"
    assert "def total" in read["prompt"][0]["content"]
    with raises_with(DataError, "'metadata'", "'func_name'"):
        read_table(f"suite:livecodebench@{write_lines(tmp_path / 'b.jsonl', [{**row, 'metadata': '{}'}])}")
    mixed = {**row, "public_test_cases": json.dumps([CASE])}
    with raises_with(DataError, "functional, stdin"):
        read_table(f"suite:livecodebench@{write_lines(tmp_path / 'c.jsonl', [mixed])}")


class Harmful:
    """Unpickled, it would make a file."""

    def __reduce__(self) -> Any:
        return open, ("unpickled", "w")


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (packed(Harmful()), "opcode"),
        (packed([json.dumps([CASE])]), "opcode"),
        (packed({"a": 1}), "opcode"),
        (packed("no json"), "JSON"),
        (packed(json.dumps({"a": 1})), "dict"),
        (base64.b64encode(b"not compressed").decode(), "private_test_cases"),
        (base64.b64encode(zlib.compress(pickle.dumps("[]"))[:-3]).decode(), "incomplete"),
        ("!!!", "private_test_cases"),
        ("[1", "JSON"),
        (json.dumps([1]), "'input'"),
    ],
)
def test_private_cases_are_never_unpickled(
    value: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_lines(tmp_path / "test.jsonl", [{**LIVECODEBENCH, "private_test_cases": value}])
    with raises_with(DataError, names):
        read_table(f"suite:livecodebench@{file}")
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("as_parquet", [False, True])
def test_ifeval_keeps_the_instructions_with_their_arguments(as_parquet: bool, tmp_path: Path) -> None:
    rows = [
        {
            "key": 1000,
            "prompt": "Write.",
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{"keyword": None}],
        },
        {
            "key": 1001,
            "prompt": "Write more.",
            "instruction_id_list": ["keywords:frequency"],
            "kwargs": [{"keyword": "sun", "frequency": 3, "relation": "at least"}],
        },
    ]
    if as_parquet:  # every row has all arguments there, most of them null
        file = tmp_path / "train.parquet"
        pd.DataFrame(rows).to_parquet(file)
    else:
        file = write_lines(tmp_path / "input_data.jsonl", rows)
    first, second = (json.loads(row["reward_model"]["ground_truth"]) for row in rows_of(f"suite:ifeval@{tmp_path}"))
    assert first == {"ids": ["punctuation:no_comma"], "kwargs": [{}]}
    assert second["kwargs"] == [{"keyword": "sun", "frequency": 3, "relation": "at least"}]
    assert rows_of(f"suite:ifeval@{file}")[1]["extra_info"]["id"] == "1001"
    with raises_with(DataError, "'kwargs'"):
        read_table(f"suite:ifeval@{write_lines(tmp_path / 'b.jsonl', [{**rows[0], 'kwargs': []}])}")
