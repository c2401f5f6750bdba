"""Reads a suite: finds its files, checks their columns, and makes the trainers' rows of the published ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.config.data_names import COMPRESSIONS, FORMATS, SuiteName, dataset_name, local_files
from hybridrl.data.data_files import read_table
from hybridrl.data.table import RowsPart, Table
from hybridrl.errors import DataError
from hybridrl.registry import SUITES
from hybridrl.utils.entry_metadata import SuiteMetadata


@dataclass(frozen=True)
class SuiteRow:
    """One problem of a suite.

    Attributes:
        prompt: messages, or the text of the user's message.
        ground_truth: the reference as text, in the form that the scorer of `data_source` reads.
        id: the problem's name in the published data; "": its number.
        data_source: chooses the scorer; None: the suite's name.
        extra: further values by name, for a reward function of one's own.
    """

    prompt: str | list[dict[str, str]]
    ground_truth: str
    id: str = ""
    data_source: str | None = None
    extra: Mapping[str, str] = field(default_factory=dict)


MakeRow = Callable[[dict[str, Any], str], SuiteRow]


def register_suite(
    name: str,
    *,
    hub: str = "",
    files: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    sampling: str = "",
    licence: str = "",
) -> Callable[[MakeRow], MakeRow]:
    """Function decorator: `suite:NAME` has the rows that the function makes of the published ones.

    The function takes a row and the words that say where it is, for messages, and returns a `SuiteRow`. It raises
    `DataError` for a row that it cannot use. For the other arguments see `hybridrl.utils.entry_metadata.SuiteMetadata`.
    """

    def add(make_row: MakeRow) -> MakeRow:
        metadata = SuiteMetadata(hub=hub, files=files, columns=columns, sampling=sampling, licence=licence)
        SUITES.add(name, make_row, metadata)
        return make_row

    return add


def read_suite(suite: SuiteName, key: str) -> RowsPart:
    """Read the rows of a suite in the schema that the trainers read.

    Args:
        suite: its name, and where its rows are.
        key: the configuration key that named it, for messages.

    Raises:
        DataError: the suite is unknown, its files cannot be read or are empty, a column is missing, or a row cannot be
            used; the error names it.
    """
    make_row, metadata = SUITES.get(suite.name), SUITES.metadata(suite.name)
    where = f"{key}=suite:{suite.name}"
    sources = [metadata.hub] if suite.place is None else _sources_in(suite, metadata, where)
    if not sources[0]:
        raise DataError(f"{where}: this suite is read from a local copy; name it: suite:{suite.name}@FILE_OR_FOLDER.")
    table = read_table(sources, where)
    names = _columns_of(table, suite.name, metadata)
    rows = []
    for number in range(len(table)):
        values = table[number]
        row = {**values, **{name: values[present] for name, present in names.items()}}
        rows.append(_trainers_row(suite.name, number, make_row(row, f"suite {suite.name}, {table.locate(number)}")))
    return RowsPart(f"suite {suite.name} ({', '.join(sources)})", rows, None)


def _trainers_row(name: str, number: int, row: SuiteRow) -> dict[str, Any]:
    prompt = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    return {
        "data_source": row.data_source or name,
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": row.ground_truth},
        "extra_info": {**row.extra, "suite": name, "index": number, "id": row.id or str(number)},
    }


def _sources_in(suite: SuiteName, metadata: SuiteMetadata, where: str) -> list[str]:
    """Return the entries that a place stands for: itself, or the files of the suite in a folder.

    A folder is that of the suite, or one with a file or folder called like the suite.
    """
    assert suite.place is not None
    folder = Path(suite.place).expanduser()
    if not folder.is_dir() or dataset_name(suite.place) is not None:
        return [suite.place]
    split = metadata.hub.rpartition(":")[2] or "test"
    suffixes = [*FORMATS, *(f"{kind}{packed}" for kind in FORMATS for packed in COMPRESSIONS)]
    named = [f"{suite.name}{suffix}" for suffix in suffixes]
    splits = [f"{split}{suffix}" for suffix in suffixes]
    inner = [*metadata.files, *splits, f"{split}-*.parquet", f"*/{split}-*.parquet"]
    patterns = [*named, *(f"{suite.name}/{pattern}" for pattern in inner), *inner]
    for pattern in patterns:
        if files := local_files(str(folder / pattern)):
            return files
    present = ", ".join(sorted(path.name for path in folder.iterdir())[:20]) or "nothing"
    expected = ", ".join((f"{suite.name}.jsonl", *metadata.files, f"{split}.jsonl", f"{split}-*.parquet"))
    raise DataError(
        f"{where}@{suite.place}: the folder has no file of the suite. Expected is one of {expected}, in it or in "
        f"{suite.name}/; it has {present}. Name the file itself: suite:{suite.name}@FILE."
    )


def _columns_of(table: Table, name: str, metadata: SuiteMetadata) -> dict[str, str]:
    """Return for each column of the suite the name that it has in the files.

    Raises:
        DataError: a file lacks a column; the error names the file, the column and those that it has.
    """
    names = {}
    for column in metadata.columns:
        choices = column.split("|")
        for part in table.parts:
            if not set(choices) & set(part.columns):
                raise DataError(
                    f"suite {name}: {part.path} has no column {' or '.join(map(repr, choices))} (it has "
                    f"{', '.join(part.columns)}). The columns are those of {metadata.hub or 'the published files'}."
                )
        names[choices[0]] = next(choice for choice in choices if choice in table.columns)
    return names
