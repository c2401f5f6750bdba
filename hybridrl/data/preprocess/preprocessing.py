"""Shared parts of the preprocessing scripts: reading a source, writing rows, the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hybridrl.config.data_names import FORMATS
from hybridrl.data.data_files import read_table
from hybridrl.data.table import Table
from hybridrl.errors import DataError, UserError
from hybridrl.utils.files import replacing

SPLITS = ("train", "test")
Row = dict[str, Any]


def read_split(folder: Path, split: str) -> Table:
    """Read the rows of `SPLIT.jsonl`, `.json` or `.parquet` in a folder, or of `SPLIT-*.parquet`, the hub's naming.

    Raises:
        DataError: there is no such file, or it cannot be read.
    """
    named = [folder / f"{split}{suffix}" for suffix in FORMATS if (folder / f"{split}{suffix}").is_file()]
    files = named[:1] or sorted(folder.glob(f"{split}-*.parquet")) or sorted(folder.glob(f"*/{split}-*.parquet"))
    if not files:
        expected = " or ".join(f"{split}{suffix}" for suffix in FORMATS)
        raise DataError(f"--local_dir {folder}: no {expected} there. Name the folder that holds the data set's files.")
    return read_table(files, "--local_dir")


def read_hub(name: str, configuration: str | None, split: str) -> Table:
    """Read the rows of one split of a dataset on the Hugging Face hub.

    Raises:
        DataError: the hub cannot be reached or has no such dataset.
    """
    config = "" if configuration is None else f"@{configuration}"
    try:
        return read_table(f"{name}{config}:{split}", "source")
    except DataError as error:
        raise DataError(f"{error} The folder that holds them is named with --local_dir.") from error


def write_rows(file: Path, rows: Iterable[Row]) -> int:
    """Write rows as parquet, atomically: a half-written file is never found.

    Returns:
        The number of rows.
    """
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(list(rows))
    with replacing(file) as temporary:
        pyarrow.parquet.write_table(table, temporary)
    return table.num_rows


def text_of(row: Row, column: str, where: str) -> str:
    """Return the value of a column that must hold text.

    Raises:
        DataError: it does not; the error names the row.
    """
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{where}: column {column!r} must be text, found {'nothing' if value is None else repr(value)[:60]}."
        )
    return value


def convert(
    out: Path, local_dir: Path | None, hub: tuple[str, str | None], make_row: Callable[[Row, str, int, str], Row]
) -> dict[str, int]:
    """Turn both splits into `train.parquet` and `test.parquet` under `out` (created if missing).

    Args:
        out: folder to write into.
        local_dir: folder of the source; None means the hub.
        hub: the source's name and configuration on the hub.
        make_row: (row, split, number, location of the row) -> row in the trainers' schema.

    Returns:
        The number of rows of each split.

    Raises:
        DataError: the source cannot be read, or one of its rows is not as expected.
    """
    converted: dict[str, list[Row]] = {}
    for split in SPLITS:
        source = read_hub(*hub, split) if local_dir is None else read_split(local_dir, split)
        converted[split] = [
            make_row(source[number], split, number, source.locate(number)) for number in range(len(source))
        ]
    out.mkdir(parents=True, exist_ok=True)
    return {split: write_rows(out / f"{split}.parquet", rows) for split, rows in converted.items()}


def command_line(module: str, description: str, run: Callable[[Path, Path | None], dict[str, int]]) -> None:
    """Run `python -m ...MODULE --out DIR [--local_dir DIR]`. A user error is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog=f"python -m hybridrl.data.preprocess.{module}", description=description)
    parser.add_argument("--out", required=True, type=Path, help="folder to write train.parquet and test.parquet into")
    parser.add_argument(
        "--local_dir", "--local-dir", type=Path, help="folder of the source (default: the Hugging Face hub)"
    )
    arguments = parser.parse_args()
    try:
        counts = run(arguments.out, arguments.local_dir)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{', '.join(f'{count} {split}' for split, count in counts.items())} rows written to {arguments.out}")
