"""A step of the controller over simulated ranks: what is sent hardly exceeds the real tokens, whatever the ranks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def scale(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(repository / "benchmarks")
    return importlib.import_module("scale")


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_step_sends_the_real_tokens_and_little_else(scale: Any, ranks: int) -> None:
    result = scale.run_step(ranks, samples=256, length=1024)
    assert result["ranks"] == ranks and 256 < result["generated_tokens"] < result["tokens"]
    assert 1.0 <= result["sent_of_real"] < 1.1
    # A completion has 8 bytes per token, and each of two passes returns a log-probability.
    assert result["received_gb"] * 1e9 < 1.25 * 16 * result["generated_tokens"]


def test_the_command_prints_each_number_of_ranks(scale: Any, capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    results = scale.main(["--ranks", "2", "4", "--samples", "64", "--length", "64", "--json", str(file)])
    assert [each["ranks"] for each in results] == [2, 4] and file.exists()
    printed = capsys.readouterr().out
    assert "2 ranks" in printed and "4 ranks" in printed and "bare copies" in printed
