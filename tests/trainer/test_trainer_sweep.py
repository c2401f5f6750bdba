"""`hybridrl grpo -m lr=1e-5,1e-6`: each combination is a run of its own, and a table compares them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_with

from hybridrl.config import ConfigError
from hybridrl.errors import UserError
from hybridrl.programs import STOPPED, main
from hybridrl.trainer.sweep import combinations_of, sweep

TREE = "sft_trainer"


@pytest.fixture
def words(micro_model: Path, sort_data: Path, tmp_path: Path) -> list[str]:
    data = [f"data.{name}_files={sort_data / f'sft_{name}.parquet'}" for name in ("train", "val")]
    if not Path(data[0].partition("=")[2]).exists():
        rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        data = [f"data.{name}_files={tmp_path / 'rows.json'}" for name in ("train", "val")]
    return [f"model.path={micro_model}", *data, f"output_dir='{tmp_path / 'it is, a run'}'"]


def program(runs: list[Any], losses: Callable[[Any], float], status: Callable[[Any], int] = lambda config: 0) -> Any:
    """A program that writes the metrics of a run, and notes its settings."""

    def run(config: Any) -> int:
        runs.append(config)
        folder = Path(config.trainer.default_local_dir)
        folder.mkdir(parents=True)
        for step in (1, 2):
            record = {"step": step, "train/loss": losses(config) / step, "val/loss": 1.0}
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        return status(config)

    return run


@given(st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=3, unique=True), min_size=1, max_size=3))
def test_every_combination_is_there_once(values: list[list[int]]) -> None:
    names = ["optim.lr", "data.seed", "optim.weight_decay"][: len(values)]
    argv = [f"{name}={','.join(map(str, numbers))}" for name, numbers in zip(names, values, strict=True)]
    found = combinations_of(TREE, ["model.path=x", *argv, "trainer.logger=[file]"])
    expected = [()]
    for name, numbers in zip(names, values, strict=True):
        expected = [(*each, f"{name}={number}") for each in expected for number in numbers]
    assert found == expected


def test_runs_follow_each_other_in_folders_of_their_own(words, tmp_path, capsys) -> None:
    runs: list[Any] = []
    argv = [*words, "-m", "lr=0.1,0.01", "seed=1,2"]
    assert sweep(TREE, program(runs, lambda config: config.optim.lr * 10), argv) == 0
    assert [(run.optim.lr, run.data.seed) for run in runs] == [(0.1, 1), (0.1, 2), (0.01, 1), (0.01, 2)]
    folders = [Path(run.trainer.default_local_dir) for run in runs]
    assert [folder.name for folder in folders] == ["lr=0.1_seed=1", "lr=0.1_seed=2", "lr=0.01_seed=1", "lr=0.01_seed=2"]
    assert {folder.parent for folder in folders} == {tmp_path / "it is, a run"}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "val/loss", "train/loss", "status", "folder"]
    assert [line.split()[:5] for line in lines[3:5]] == [
        ["lr=0.01", "seed=1", "1", "*", "0.05"],
        ["lr=0.01", "seed=2", "1", "*", "0.05"],
    ]
    assert all("0.05 *" in line for line in lines[3:]) and not any("0.5 *" in line for line in lines)


def test_no_run_starts_where_one_has_a_fault(words, capsys) -> None:
    runs: list[Any] = []
    assert sweep(TREE, program(runs, lambda config: 1.0), [*words, "-m", "lr=0.1,much"]) == 2
    errors = capsys.readouterr().err
    assert not runs and "optim.lr" in errors and "with lr=much" in errors


def test_a_run_that_fails_does_not_keep_the_next_from_starting(words, capsys) -> None:
    runs: list[Any] = []

    def status(config: Any) -> int:
        if config.data.seed == 1:
            raise UserError("no luck")
        return 0

    assert sweep(TREE, program(runs, lambda config: 1.0, status), [*words, "-m", "seed=1,2"]) == 2
    printed = capsys.readouterr()
    assert len(runs) == 2 and "no luck" in printed.err and "failed (2)" in printed.out and "finished" in printed.out


def test_a_run_that_is_stopped_ends_the_sweep(words, capsys) -> None:
    runs: list[Any] = []
    argv = [*words, "--multirun", "seed=1,2,3"]
    assert sweep(TREE, program(runs, lambda config: 1.0, lambda config: STOPPED), argv) == STOPPED
    assert len(runs) == 1 and capsys.readouterr().out.count("not run") == 2


def test_several_values_without_the_option_are_refused_and_named(words, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sft", *words, "lr=0.1,0.2"])
    assert ended.value.code == 2 and "-m" in capsys.readouterr().err
    with raises_with(ConfigError, "-m"):
        combinations_of(TREE, ["lr=0.1"])


def test_the_command_sweeps(words, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sft", *words, "-m", "lr=0.1,much"])
    assert ended.value.code == 2 and "with lr=much" in capsys.readouterr().err
