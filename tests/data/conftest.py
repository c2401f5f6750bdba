"""What the tests of data share: tokenizers, and a way to write rows to a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The quickstart's character tokenizer, with its chat template."""
    from hybridrl.models.tiny import build_tokenizer

    return build_tokenizer()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, list[dict[str, Any]]], Path]:
    """Write rows as the file's suffix says; returns its path."""

    def write_rows(name: str, rows: list[dict[str, Any]]) -> Path:
        path = tmp_path / name
        if path.suffix == ".parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            path.write_text(json.dumps(rows))
        return path

    return write_rows


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """Seven prompts of 1 to 7 digits in the trainers' schema."""
    return [
        {
            "data_source": "hybridrl/sort",
            "prompt": [{"role": "user", "content": f"Sort: {'9876543'[: number + 1]}"}],
            "reward_model": {"style": "rule", "ground_truth": "".join(sorted("9876543"[: number + 1]))},
            "extra_info": {"split": "train", "index": number},
        }
        for number in range(7)
    ]
