"""Integers of a column with missing values, which pandas writes as floats: 1 becomes 1.0, and no answer is "1.0".

Such a column has missing values (null or NaN), and all others are whole. It is read as integers with nulls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.notify import notify

if TYPE_CHECKING:
    import pyarrow

_LARGEST = 2**53  # floats have every integer up to this one
_WHOLE_TEXT = re.compile(r"[+-]?\d+\.0")


def report_whole_numbers(path: Path | str, names: Sequence[str]) -> None:
    """Say which columns are read as integers."""
    if names:
        notify(
            f"{path}: {', '.join(map(repr, names))}: whole numbers, written as floats because values are missing, are "
            "read as integers (1.0 as 1); write them as text if the fraction is a part of them"
        )


def whole_columns(table: pyarrow.Table) -> tuple[pyarrow.Table, list[str]]:
    """Return a table whose integers are integers, also in objects, and the names of the columns that changed."""
    changed: list[str] = []
    for index, field in enumerate(table.schema):
        array, names = _whole_array(table.column(index), field.name)
        if names:
            table = table.set_column(index, field.name, array)
            changed += names
    return table, changed


def _whole_array(array: Any, name: str) -> tuple[Any, list[str]]:
    """An array, and the names of what is integers in it now."""
    import pyarrow
    import pyarrow.compute as compute

    kind = array.type
    if pyarrow.types.is_struct(kind):
        combined = array.combine_chunks() if isinstance(array, pyarrow.ChunkedArray) else array
        fields = [
            _whole_array(combined.field(number), f"{name}.{kind.field(number).name}")
            for number in range(kind.num_fields)
        ]
        names = [each for _, own in fields for each in own]
        if not names:
            return array, []
        labels = [kind.field(number).name for number in range(kind.num_fields)]
        return pyarrow.StructArray.from_arrays([own for own, _ in fields], labels, mask=combined.is_null()), names
    if not pyarrow.types.is_float64(kind) or not len(array):
        return array, []
    missing = compute.is_null(array, nan_is_null=True)
    present = compute.filter(array, compute.invert(missing))
    if len(present) == len(array) or not len(present):
        return array, []
    if not compute.all(compute.is_finite(present)).as_py() or compute.max(compute.abs(present)).as_py() > _LARGEST:
        return array, []
    if not compute.all(compute.equal(compute.trunc(present), present)).as_py():
        return array, []
    nulls = compute.if_else(missing, pyarrow.scalar(None, pyarrow.float64()), array)
    return compute.cast(nulls, pyarrow.int64()), [name]


def whole_rows(rows: Sequence[dict[str, Any]], text_is_number: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows whose integers are integers, also in objects, and the names of the columns that changed.

    Args:
        rows: rows as Python objects.
        text_is_number: text such as "1.0" counts as the number that it is. A CSV file has no other numbers; in other
            files, text is what its author wrote as text.
    """
    changed: list[str] = []
    result = list(rows)
    for name in dict.fromkeys(name for row in rows for name in row if isinstance(name, str)):
        values = [row[name] for row in rows if name in row]
        whole, inner = _whole_values(values, text_is_number)
        if not inner:
            continue
        changed += [f"{name}.{path}" if path else name for path in inner]
        replaced = iter(whole)
        result = [{**row, name: next(replaced)} if name in row else row for row in result]
    return result, changed


def _whole_values(values: Sequence[Any], text_is_number: bool) -> tuple[Sequence[Any], list[str]]:
    """The values of a column, and the paths in them that are integers now; an empty path is the value itself."""
    present = [value for value in values if not _is_missing(value)]
    if not present:
        return values, []
    if all(isinstance(value, Mapping) for value in present):
        rows, names = whole_rows([dict(value) for value in present], text_is_number)
        replaced = iter(rows)
        return ([None if _is_missing(value) else next(replaced) for value in values], names) if names else (values, [])
    is_whole = _is_whole_text if text_is_number else _is_whole_float
    if len(present) == len(values) or not all(map(is_whole, present)):
        return values, []
    return [None if _is_missing(value) else _integer(value) for value in values], [""]


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_whole_text(value: Any) -> bool:
    return isinstance(value, str) and _WHOLE_TEXT.fullmatch(value) is not None


def _is_whole_float(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST


def _integer(value: float | str) -> int | str:
    return value[:-2] if isinstance(value, str) else int(value)
