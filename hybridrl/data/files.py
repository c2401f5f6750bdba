"""Rows of parquet, JSON and JSON-lines files as one table.

Parquet stays in Arrow memory, and a row becomes Python objects when it is read. JSON rows are Python objects from the
start. A row keeps its file and line, so that an error can say which line of which file to fix.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.errors import DataError

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".parquet", ".json", ".jsonl")


class _ArrowPart:
    """A parquet file, or a table in memory that `path` describes. Rows are counted from 0."""

    def __init__(self, path: Path | str, table: pyarrow.Table) -> None:
        self.path = path
        self.table = table
        self.columns = list(table.column_names)

    def __len__(self) -> int:
        return self.table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        return self.table.slice(index, 1).to_pylist()[0]

    def column(self, name: str) -> list[Any]:
        return self.table.column(name).to_pylist()

    def arrow(self) -> pyarrow.Table:
        return self.table

    def locate(self, index: int) -> str:
        return f"{self.path}, row {index} (counted from 0)"


class _JsonPart:
    """One JSON or JSON-lines file. Rows are named by their line, or by their position in a JSON list."""

    def __init__(self, path: Path | str, rows: list[dict[str, Any]], lines: list[int] | None) -> None:
        self.path = path
        self.rows = rows
        self.lines = lines
        self.columns = list(dict.fromkeys(key for row in rows for key in row))

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {name: row.get(name) for name in self.columns}

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self.rows]

    def arrow(self) -> pyarrow.Table:
        import pyarrow

        return pyarrow.Table.from_pydict({name: self.column(name) for name in self.columns})

    def locate(self, index: int) -> str:
        if self.lines is None:
            return f"{self.path}, item {index} (counted from 0)"
        return f"{self.path}, line {self.lines[index]}"


class Table:
    """The rows of several files, in order.

    Attributes:
        parts: one part per file, in the order given.
        columns: every column that any of the files has. Rows of a file that lacks a column hold None there.
    """

    def __init__(self, parts: Sequence[_ArrowPart | _JsonPart]) -> None:
        self.parts = list(parts)
        self._ends: list[int] = []
        total = 0
        for part in self.parts:
            total += len(part)
            self._ends.append(total)
        self.columns = list(dict.fromkeys(name for part in self.parts for name in part.columns))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _find(self, index: int) -> tuple[_ArrowPart | _JsonPart, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect.bisect_right(self._ends, index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        part, inner = self._find(index)
        row = part.row(inner)
        return {name: row.get(name) for name in self.columns}

    def arrow(self) -> pyarrow.Table:
        """Return all rows in Arrow memory. Parquet columns keep their types; the types of JSON columns are inferred.

        Raises:
            DataError: no single type can hold the values of a column; the error names the file.
        """
        import pyarrow

        tables = []
        for part in self.parts:
            try:
                tables.append(part.arrow())
            except pyarrow.ArrowException as error:
                raise DataError(f"{part.path}: cannot be kept as parquet: {error}.") from error
        try:
            return pyarrow.concat_tables(tables, promote_options="permissive")
        except pyarrow.ArrowException as error:
            files = ", ".join(str(part.path) for part in self.parts)
            raise DataError(f"{files}: their columns do not fit into one parquet file: {error}.") from error

    def column(self, name: str) -> list[Any]:
        """Return all values of one column as Python objects, None where a file lacks it."""
        values: list[Any] = []
        for part in self.parts:
            values.extend(part.column(name) if name in part.columns else [None] * len(part))
        return values

    def locate(self, index: int) -> str:
        """Return the file and row of `index`, for messages."""
        part, inner = self._find(index)
        return part.locate(inner)

    def files_without(self, column: str) -> Iterator[_ArrowPart | _JsonPart]:
        """Yield the files that lack a column."""
        return (part for part in self.parts if column not in part.columns)

    def require(self, column: str, key: str, hint: str = "") -> None:
        """Refuse files that lack `column`, which the configuration key `key` names.

        Raises:
            DataError: a file lacks it; the error names the file, the columns it has and what to change.
        """
        for part in self.files_without(column):
            found = ", ".join(part.columns) or "none"
            raise DataError(
                f"{part.path} has no column {column!r} (columns found: {found}). "
                f"{hint or f'Add it, or name the right column with {key}=COLUMN.'}"
            )


def table_of(rows: Any, origin: str) -> Table:
    """Make a table from rows that are already in memory.

    Args:
        rows: a `datasets.Dataset`, a `pandas.DataFrame`, a `pyarrow.Table`, or a list of dicts.
        origin: where the rows come from, for messages.

    Raises:
        DataError: `rows` is something else, or empty.
    """
    import datasets
    import pandas
    import pyarrow

    if isinstance(rows, datasets.Dataset):
        rows = rows.flatten_indices().data.table  # a filtered or shuffled dataset is a table with a list of indices
    elif isinstance(rows, pandas.DataFrame):
        rows = pyarrow.Table.from_pandas(rows, preserve_index=False)
    part: _ArrowPart | _JsonPart
    if isinstance(rows, pyarrow.Table):
        part = _ArrowPart(origin, rows)
    elif isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        part = _JsonPart(origin, rows, None)
    else:
        raise DataError(
            f"{origin}: rows must be a datasets.Dataset, a pandas.DataFrame, a pyarrow.Table or a list of dicts, found "
            f"{type(rows).__name__}."
        )
    if len(part) == 0:
        raise DataError(f"{origin}: there are no rows.")
    return Table([part])


def read_table(files: str | Path | Sequence[str | Path], key: str = "data.train_files") -> Table:
    """Read one or several .parquet, .json or .jsonl files.

    Args:
        files: one or several paths; `~` is expanded.
        key: the configuration key that named them, for messages.

    Raises:
        DataError: no file is named, or a file is missing, unreadable, of another kind, or empty.
    """
    paths = [files] if isinstance(files, (str, Path)) else list(files or [])
    if not paths:
        raise DataError(
            f"{key} names no file. Set it to a .parquet, .json or .jsonl file, or to a list of them: {key}=[A,B]."
        )
    return Table([_read_file(path, key) for path in paths])


def _read_file(name: str | Path, key: str) -> _ArrowPart | _JsonPart:
    if "://" in str(name):
        raise DataError(f"{key}={name}: only local files can be read. Copy it to a local disk first and name the copy.")
    path = Path(name).expanduser()
    if path.is_dir():
        inside = sorted(str(file) for file in path.iterdir() if file.suffix in SUFFIXES)
        example = f"{key}=[{','.join(inside[:3])}{',...' if len(inside) > 3 else ''}]" if inside else f"{key}=FILE"
        raise DataError(f"{key}={name} is a directory. Name the files in it: {example}")
    if not path.exists():
        raise DataError(
            f"{key}={name}: no such file (looked for {path.absolute()}). Check the path, or make it with "
            "hybridrl.data.preprocess."
        )
    if path.suffix not in SUFFIXES:
        raise DataError(f"{key}={name}: unknown kind of file {path.suffix!r}. Allowed are {', '.join(SUFFIXES)}.")
    if path.stat().st_size == 0:
        raise DataError(f"{key}={name}: the file is empty (0 bytes). Write it again.")
    part = _read_parquet(path, key) if path.suffix == ".parquet" else _read_json(path, key)
    if len(part) == 0:
        raise DataError(f"{key}={name}: the file has no rows. Write it again, or leave it out of {key}.")
    return part


def _read_parquet(path: Path, key: str) -> _ArrowPart:
    import pyarrow
    import pyarrow.parquet

    try:
        return _ArrowPart(path, pyarrow.parquet.read_table(path))
    except (pyarrow.ArrowException, OSError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{key}={path}: cannot be read as parquet ({first_line}). The file is damaged or of another kind; write it "
            "again."
        ) from error


def _read_json(path: Path, key: str) -> _JsonPart:
    """Read a JSON file. One that begins with `[` is a list of rows; any other holds one row per line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{key}={path}: cannot be read as UTF-8 text ({error}).") from error
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{key}={path}, line {error.lineno}: not valid JSON ({error.msg}).") from error
        lines = None
    else:
        rows, lines = _read_json_lines(path, text, key)
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            where = f"item {index}" if lines is None else f"line {lines[index]}"
            raise DataError(f"{key}={path}, {where}: a row must be a JSON object, found {type(row).__name__}.")
    return _JsonPart(path, rows, lines)


def _read_json_lines(path: Path, text: str, key: str) -> tuple[list[Any], list[int]]:
    rows, lines = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DataError(
                f"{key}={path}, line {number}: not valid JSON ({error.msg}). A file holds one JSON object a line, or "
                "one list of them."
            ) from error
        lines.append(number)
    return rows, lines
