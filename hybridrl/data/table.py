"""The rows of one or several sources as one table.

Rows of parquet files and data sets stay in Arrow memory, and a row becomes Python objects when it is read. Rows of text
files are Python objects from the start. A row keeps its file and line, so that an error can say which line of which
file to fix.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.data.whole_numbers import report_whole_numbers, whole_columns, whole_rows
from hybridrl.errors import DataError

if TYPE_CHECKING:
    import pyarrow

REWARD_MODEL = "reward_model"  # verl's column of the ground truth
#: columns whose lists of numbers a reward function may compare with answers
_WITH_TRUTHS = (REWARD_MODEL, "ground_truth", "extra_info")


FieldPath = tuple[str, ...]


def _empty_fields(array: pyarrow.Array, path: FieldPath = ()) -> set[FieldPath]:
    """The fields of objects in an array for which no object has a value. Lists add nothing to a path."""
    import pyarrow

    if pyarrow.types.is_list(array.type) or pyarrow.types.is_large_list(array.type):
        return _empty_fields(array.flatten(), path)
    if not pyarrow.types.is_struct(array.type):
        return set()
    empty: set[FieldPath] = set()
    for field, values in zip(array.type, array.flatten(), strict=True):
        own = (*path, field.name)
        empty |= {own} if values.null_count == len(values) else _empty_fields(values, own)
    return empty


def _as_written(table: pyarrow.Table) -> pyarrow.Table:
    """Return a table whose numbers of 16 and 32 bits are the shortest decimals for them, with 64 bits.

    Python would read 0.1 of 32 bits as 0.10000000149011612, which equals no answer. Lists of numbers, such as pixels,
    stay, but for those of ground truths, and those in lists of objects, such as messages.
    """
    for index, field in enumerate(table.schema):
        if _has_few_bits(field.type, in_lists=field.name in _WITH_TRUTHS):
            column = _shortest_decimals(table.column(index).combine_chunks(), field.name in _WITH_TRUTHS)
            table = table.set_column(index, field.name, column)
    return table


def _has_few_bits(kind: pyarrow.DataType, in_lists: bool) -> bool:
    import pyarrow

    if pyarrow.types.is_struct(kind):
        return any(_has_few_bits(field.type, in_lists) for field in kind)
    if pyarrow.types.is_map(kind):
        return _has_few_bits(kind.key_type, in_lists) or _has_few_bits(kind.item_type, in_lists)
    if _is_list(kind):
        in_lists = in_lists or _holds_objects(kind)
        return in_lists and _has_few_bits(kind.value_type, in_lists)
    return bool(pyarrow.types.is_float16(kind) or pyarrow.types.is_float32(kind))


def _is_list(kind: pyarrow.DataType) -> bool:
    import pyarrow

    types = pyarrow.types
    plain = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(plain or types.is_list_view(kind) or types.is_large_list_view(kind))


def _holds_objects(kind: pyarrow.DataType) -> bool:
    """Whether the items of a list are objects, and no files of media."""
    import pyarrow

    return bool(pyarrow.types.is_struct(kind.value_type)) and not _is_media_type(kind.value_type)


def _shortest_decimals(array: pyarrow.Array, in_lists: bool) -> pyarrow.Array:
    import pyarrow

    if not _has_few_bits(array.type, in_lists):
        return array
    if pyarrow.types.is_struct(array.type):
        fields = [_shortest_decimals(array.field(index), in_lists) for index in range(array.type.num_fields)]
        return pyarrow.StructArray.from_arrays(fields, [field.name for field in array.type], mask=array.is_null())
    if pyarrow.types.is_map(array.type):
        pair = pyarrow.struct([("key", array.type.key_type), ("value", array.type.item_type)])
        pairs = array.cast(pyarrow.list_(pair)).flatten()
        keys, values = (_shortest_decimals(pairs.field(number), in_lists) for number in range(2))
        ends = _ends_of(array.cast(pyarrow.list_(pair))).cast(pyarrow.int32())
        return pyarrow.MapArray.from_arrays(ends, keys, values, mask=array.is_null())
    if _is_list(array.type):
        items = _shortest_decimals(array.flatten(), in_lists or _holds_objects(array.type))
        return pyarrow.LargeListArray.from_arrays(_ends_of(array), items, mask=array.is_null())
    kind = array.type.to_pandas_dtype()
    return pyarrow.array(
        [None if value is None else float(str(kind(value))) for value in array.to_pylist()], pyarrow.float64()
    )


def _ends_of(array: pyarrow.Array) -> pyarrow.Array:
    """Where the lists of an array begin among all their items, and where the last one ends."""
    import pyarrow

    lengths = [0 if length is None else length for length in array.value_lengths().to_pylist()]
    return pyarrow.array([0, *itertools.accumulate(lengths)], pyarrow.int64())


#: the fields of a file of media, as `datasets` stores images, videos and sounds
_MEDIA_FIELDS = ({"bytes", "path"}, {"array", "sampling_rate"})


def _is_media_type(kind: pyarrow.DataType) -> bool:
    import pyarrow

    if _is_list(kind):
        return _is_media_type(kind.value_type)
    names = {field.name for field in kind} if pyarrow.types.is_struct(kind) else set()
    return any(fields <= names for fields in _MEDIA_FIELDS)


def _is_media_value(value: Any) -> bool:
    """Whether a value is a file of media, a picture of Pillow, or a list of such."""
    if isinstance(value, list):
        return bool(value) and _is_media_value(value[0])
    if isinstance(value, Mapping):
        return any(fields <= value.keys() for fields in _MEDIA_FIELDS)
    return hasattr(value, "convert") and hasattr(value, "getexif")


def _repeated_field(kind: pyarrow.DataType) -> str | None:
    """The first name that an object has twice, of which a row could hold one value alone."""
    import pyarrow

    if pyarrow.types.is_map(kind):
        return _repeated_field(kind.item_type)
    if _is_list(kind):
        return _repeated_field(kind.value_type)
    if not pyarrow.types.is_struct(kind):
        return None
    names = [field.name for field in kind]
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    return twice or next(filter(None, (_repeated_field(field.type) for field in kind)), None)


class ArrowPart:
    """Rows in Arrow memory, which `path` describes: a parquet file, a data set of the hub. They are counted from 0.

    Raises:
        DataError: objects of a column have a field twice.
    """

    def __init__(self, path: Path | str, table: pyarrow.Table) -> None:
        self.path = path
        for column in table.schema:
            if twice := _repeated_field(column.type):
                raise DataError(
                    f"{path}: the objects in column {column.name!r} have the field {twice!r} more than once, and only "
                    "one value could be read. Rename or remove the others."
                )
        self.table, whole = whole_columns(_as_written(table))
        report_whole_numbers(path, whole)
        self.columns = list(table.column_names)

    def __len__(self) -> int:
        return self.table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        return self.table.slice(index, 1).to_pylist()[0]

    def column(self, name: str) -> list[Any]:
        return self.table.column(name).to_pylist()

    def arrow(self) -> pyarrow.Table:
        return self.table

    def media_columns(self) -> list[str]:
        return [
            field.name
            for field in self.table.schema
            if _is_media_type(field.type) and self.table.column(field.name).null_count < len(self)
        ]

    def with_ground_truth(self, name: str) -> ArrowPart:
        return self._with_truth(self.table.column(name).combine_chunks())

    def with_answers(self, answers: Sequence[str | None]) -> ArrowPart:
        import pyarrow

        return self._with_truth(pyarrow.array(answers, pyarrow.string()))

    def _with_truth(self, truth: pyarrow.Array) -> ArrowPart:
        import pyarrow

        style = pyarrow.array(["rule"] * len(truth), pyarrow.string())
        column = pyarrow.StructArray.from_arrays([style, truth], ["style", "ground_truth"])
        table = self.table.drop_columns([REWARD_MODEL] if REWARD_MODEL in self.columns else [])
        return ArrowPart(self.path, table.append_column(REWARD_MODEL, column))

    def locate(self, index: int) -> str:
        return f"{self.path}, row {index} (counted from 0)"


class RowsPart:
    """Rows as Python objects. They are named by their line, or by their position in a list.

    Args:
        path: the file, or words for where the rows come from.
        rows: a dictionary per row.
        lines: the line of each row; None: they are items of a list.
        text_is_number: numbers are written as text, as in CSV files.
    """

    def __init__(
        self, path: Path | str, rows: list[dict[str, Any]], lines: list[int] | None, text_is_number: bool = False
    ) -> None:
        self.path = path
        self.rows, whole = whole_rows(rows, text_is_number)
        report_whole_numbers(path, whole)
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

    def media_columns(self) -> list[str]:
        return [name for name in self.columns if any(map(_is_media_value, self.column(name)))]

    def with_ground_truth(self, name: str) -> RowsPart:
        return self.with_answers([row.get(name) for row in self.rows])

    def with_answers(self, answers: Sequence[Any]) -> RowsPart:
        rows = [
            {**row, REWARD_MODEL: {"style": "rule", "ground_truth": answer}}
            for row, answer in zip(self.rows, answers, strict=True)
        ]
        return RowsPart(self.path, rows, self.lines)

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

    def __init__(self, parts: Sequence[ArrowPart | RowsPart]) -> None:
        self.parts = list(parts)
        self._ends: list[int] = []
        total = 0
        for part in self.parts:
            total += len(part)
            self._ends.append(total)
        self.columns = list(dict.fromkeys(name for part in self.parts for name in part.columns))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _find(self, index: int) -> tuple[ArrowPart | RowsPart, int]:
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

    def files(self) -> list[str]:
        """Return the file of each row, or what else its part was read from."""
        return [str(part.path) for part in self.parts for _ in range(len(part))]

    def media_columns(self) -> list[str]:
        """Return the names of columns with files of media, by the form of their values."""
        return list(dict.fromkeys(name for part in self.parts for name in part.media_columns()))

    def locate(self, index: int) -> str:
        """Return the file and row of `index`, for messages."""
        part, inner = self._find(index)
        return part.locate(inner)

    def check_ground_truths(self) -> None:
        """Refuse ground truths that nothing would read: reward functions would get None.

        Raises:
            DataError: a row's `reward_model` is no object; the error names the row.
        """
        for index, value in enumerate(self.column(REWARD_MODEL) if REWARD_MODEL in self.columns else []):
            if value is not None and not isinstance(value, Mapping):
                raise DataError(
                    f"{self.locate(index)}: column {REWARD_MODEL!r} is {type(value).__name__} ({str(value)[:40]!r}), "
                    'and the ground truth is read from an object. Write {"style": "rule", "ground_truth": ANSWER}, '
                    "name the column of the answer with data.ground_truth_key=COLUMN, or rename the column."
                )

    def with_ground_truth(self, name: str, key: str = "data.ground_truth_key") -> Table:
        """Return the table with a column `reward_model`, `{style, ground_truth}`, of the values of another column.

        Raises:
            DataError: a file lacks the column, which the configuration key `key` names.
        """
        self.require(name, key)
        return Table([part.with_ground_truth(name) for part in self.parts])

    def with_answers(self, answers: Sequence[str | None]) -> Table:
        """Return the table with a column `reward_model` of these answers, one per row."""
        ends = zip(self.parts, self._ends, strict=True)
        return Table([part.with_answers(answers[end - len(part) : end]) for part, end in ends])

    def has_padding(self, index: int) -> bool:
        """Whether the objects of a row have nulls for fields that only other rows have, as Arrow and Parquet write."""
        return isinstance(self._find(index)[0], ArrowPart)

    def empty_fields(self, name: str) -> set[FieldPath]:
        """Return the fields of objects in an Arrow column that are null in all rows of its file, so no padding."""
        parts = [part for part in self.parts if isinstance(part, ArrowPart) and name in part.columns]
        columns = [part.table.column(name).combine_chunks() for part in parts]
        return {path for column in columns for path in _empty_fields(column)}

    def files_without(self, column: str) -> Iterator[ArrowPart | RowsPart]:
        """Yield the files that lack a column."""
        return (part for part in self.parts if column not in part.columns)

    def require(self, column: str, key: str, hint: str = "") -> None:
        """Refuse files that lack `column`, which the configuration key `key` names.

        Raises:
            DataError: a file lacks it; the error names the file, the columns it has and what to change.
        """
        for part in self.files_without(column):
            present = ", ".join(part.columns) or "none"
            raise DataError(
                f"{part.path} has no column {column!r} (columns found: {present}). "
                f"{hint or f'Add it, or name the right column with {key}=COLUMN.'}"
            )


def table_of(rows: Any, origin: str) -> Table:
    """Make a table from rows that are already in memory.

    Args:
        rows: a `datasets.Dataset`, a `pandas.DataFrame`, a `pyarrow.Table`, a list or an iterator of dicts, or a list
            of texts, which are prompts.
        origin: where the rows come from, for messages.

    Raises:
        DataError: `rows` is something else, or empty.
    """
    import datasets
    import pandas
    import pyarrow

    if isinstance(rows, datasets.DatasetDict) and len(rows) == 1:
        rows = next(iter(rows.values()))
    elif isinstance(rows, Iterator | tuple):
        rows = list(rows)
    if isinstance(rows, list) and rows and all(isinstance(row, str) for row in rows):
        rows = [{"prompt": text} for text in rows]
    if isinstance(rows, pandas.DataFrame | pyarrow.Table):
        names = rows.column_names if isinstance(rows, pyarrow.Table) else map(str, rows.columns)
        check_column_names(list(names), origin)
    if isinstance(rows, datasets.Dataset):
        rows = rows.with_format("arrow")[:]  # also of one that was filtered or shuffled
    elif isinstance(rows, pandas.DataFrame):
        try:
            rows = pyarrow.Table.from_pandas(rows, preserve_index=False)
        except pyarrow.ArrowException as error:
            raise DataError(f"{origin}: the DataFrame's columns have no single type: {error}.") from error
    part: ArrowPart | RowsPart
    if isinstance(rows, pyarrow.Table):
        part = ArrowPart(origin, rows)
    elif isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        part = RowsPart(origin, rows, None)
    else:
        raise DataError(
            f"{origin}: rows must be a datasets.Dataset (one split), a pandas.DataFrame, a pyarrow.Table, or a list of "
            f"dicts or of texts, found {_kind(rows)}.{_remedy(rows)}"
        )
    if len(part) == 0:
        raise DataError(f"{origin}: the data has no rows.")
    return Table([part])


def check_column_names(names: Sequence[str], origin: str) -> None:
    """Refuse two columns of one name, of which a row could hold one alone.

    Raises:
        DataError: names the column.
    """
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise DataError(f"{origin}: there are {names.count(twice)} columns {twice!r}. Rename or remove the others.")


def _remedy(rows: Any) -> str:
    """Advice for rows of a wrong type that can be converted; may be empty."""
    import datasets

    if isinstance(rows, datasets.DatasetDict):
        return f" Choose a split: data[{next(iter(rows))!r}]." if rows else ""
    if isinstance(rows, datasets.IterableDataset):
        return " A streamed data set is read with list(data.take(1000))."
    if isinstance(rows, Mapping):
        return " A dict of columns becomes rows with datasets.Dataset.from_dict(data)."
    return ""


def _kind(rows: Any) -> str:
    """Describe rows of a wrong type, for messages."""
    if isinstance(rows, Mapping):
        return f"{type(rows).__name__} with the keys {', '.join(map(str, rows))}"
    if isinstance(rows, list):
        return f"a list with {type(next(row for row in rows if not isinstance(row, dict))).__name__} in it"
    return type(rows).__name__
