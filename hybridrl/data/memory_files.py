"""Rows that are in memory, saved as a data file that a run can read and a resumed run finds again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hybridrl.data.table import ArrowPart, table_of
from hybridrl.errors import DataError
from hybridrl.utils.files import replacing


def save_rows(rows: Any, folder: str | Path, name: str = "train") -> Path:
    """Save rows under a name that depends on their content, for `data.train_files` or `data.val_files`.

    A list of dicts becomes JSON lines, anything else parquet, so that a row read from the file equals the row given.
    The name holds a hash of the content: the same rows are the same file in a later run, and other rows never replace
    the file of a run that may be resumed.

    Args:
        rows: a list of dicts, a `datasets.Dataset`, a `pandas.DataFrame` or a `pyarrow.Table`.
        folder: created if missing.
        name: how the file's name begins.

    Returns:
        The file, `FOLDER/NAME-HASH.jsonl` or `.parquet`.

    Raises:
        DataError: the rows are of another type, there are none, or a value cannot be saved without changing it.
    """
    folder = Path(folder)
    (part,) = table_of(rows, name).parts
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(part, ArrowPart):
        return _save_parquet(part.table, folder, name)
    text = "".join(_line(row, f"{name}, item {number}") for number, row in enumerate(part.rows))
    path = folder / f"{name}-{_digest(text.encode())}.jsonl"
    if not path.exists():
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return path


def _save_parquet(table: Any, folder: Path, name: str) -> Path:
    import pyarrow
    import pyarrow.parquet

    buffer = pyarrow.BufferOutputStream()
    try:
        pyarrow.parquet.write_table(table.replace_schema_metadata(None), buffer)
    except pyarrow.ArrowException as error:
        raise DataError(f"{name}: the rows cannot be kept as parquet: {error}.") from error
    content = buffer.getvalue()
    path = folder / f"{name}-{_digest(content)}.parquet"
    if not path.exists():
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    return path


def _digest(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _line(row: dict[str, Any], where: str) -> str:
    for column, value in row.items():
        try:
            same = isinstance(column, str) and json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise DataError(
                f"{where} (counted from 0): column {column!r} holds {type(value).__name__} {repr(value)[:60]}, which "
                "JSON cannot keep as it is. Rows may hold text, finite numbers, true, false, None, lists, and dicts "
                "whose keys are text."
            )
    return json.dumps(row) + "\n"
