"""Reads data files of this machine and of addresses, globs of them, data sets of the hub, and suites, as one table."""

from __future__ import annotations

import bz2
import csv
import functools
import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config.data_names import (
    COMPRESSIONS,
    FORMATS,
    DatasetName,
    dataset_name,
    format_of,
    is_saved_dataset,
    local_files,
    suite_name,
)
from hybridrl.data.table import ArrowPart, RowsPart, Table, check_column_names
from hybridrl.errors import DataError, RemoteFileError
from hybridrl.notify import notify
from hybridrl.utils.finite_json import NoNumberError, finite_json
from hybridrl.utils.remote_files import local_copy, matching
from hybridrl.utils.urls import is_remote, masked, without_file_scheme

if TYPE_CHECKING:
    import datasets

_ALLOWED = f"{', '.join(FORMATS)}; text files may be compressed ({', '.join(COMPRESSIONS)})"
_WITH_PANDAS = " From Python, give pandas.read_excel(FILE) as data, or save the sheet as CSV."
#: what to do with files of other kinds
_REMEDIES = {
    ".xlsx": _WITH_PANDAS,
    ".xls": _WITH_PANDAS,
    ".txt": " A prompt per line is a list in Python: data=open(FILE).read().splitlines().",
    ".arrow": " From Python, give datasets.Dataset.from_file(FILE) as data; a saved data set is named by its folder.",
    ".zip": " Unpack it, and name the files in it.",
}
_TEXTS = (".json", ".jsonl", ".csv", ".tsv")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_MAX_FIELD = 2**31 - 1  # of CSV, in characters; the csv module's own limit is 131,072


def read_table(files: str | Path | Sequence[str | Path], key: str = "data.train_files") -> Table:
    """Read one or several sources.

    Args:
        files: files (.parquet, .json, .jsonl, .csv, .tsv; text files may be compressed), globs, addresses of either
            (`s3://BUCKET/FILE`; fetched once, see `hybridrl.utils.remote_files`), data sets of the hub
            (`ORG/NAME@CONFIG:SPLIT`), or benchmark suites (`suite:NAME@PLACE`), see `hybridrl.config.data_names`;
            `~` is expanded.
        key: the configuration key that named them, for messages.

    Raises:
        DataError: no file is named, or a file is missing, unreadable, of another kind, or empty.
    """
    entries = [files] if isinstance(files, (str, Path)) else list(files or [])
    if not entries:
        raise DataError(
            f"{key} names no file. Set it to a .parquet, .json, .jsonl or .csv file, or to a list of them: {key}=[A,B]."
        )
    return Table([part for entry in entries for part in _read(str(entry), key)])


@dataclass(frozen=True)
class DataFile:
    """A file of rows.

    Attributes:
        path: where it is read.
        name: what messages call it: the path, or its address without credentials.
    """

    path: Path
    name: str

    def __str__(self) -> str:
        return self.name


def files_of(entry: str, key: str) -> list[DataFile]:
    """Return the files that an entry names, those of an address fetched to this machine; empty if there are none.

    Raises:
        DataError: files of an address cannot be listed or fetched.
    """
    if not is_remote(entry):
        return [DataFile(Path(file).expanduser(), file) for file in local_files(entry)]
    try:
        return [DataFile(local_copy(file), file.url) for file in matching(entry)]
    except RemoteFileError as error:
        raise DataError(f"{key}={error}.") from None


def fingerprints(files: Sequence[str]) -> list[list[str]]:
    """Return the name of each source with a digest that changes with its content."""
    digests = []
    for entry in files:
        is_read = _is_read_for_digest(entry)
        if is_read:
            (part,) = _read(entry, "data.path")
            digests.append([entry, _digest_of_rows(part)])
        for file in () if is_read else files_of(entry, "data.path"):
            with open(file.path, "rb") as opened:
                digests.append([file.path.name, hashlib.file_digest(opened, "sha256").hexdigest()])
    return digests


def contents(sources: Sequence[str], fetch: bool = True) -> list[list[str]]:
    """Return digests of what each source holds, in order, wherever it lies. Files that were read before are not again.

    What cannot be read here, such as the name of what a dataset class of one's own makes, stands for itself.

    Args:
        fetch: fetch files of addresses; else an address stands for itself.
    """
    digests = []
    for entry in sources:
        try:
            if _is_read_for_digest(entry):
                digests.append([_digest_of_rows(part) for part in _read(entry, "data.train_files")])
                continue
            files = files_of(entry, "data.train_files") if fetch or not is_remote(entry) else []
        except DataError:
            digests.append([masked(entry)])
            continue
        inner = [
            path for file in files for path in (sorted(file.path.rglob("*")) if file.path.is_dir() else [file.path])
        ]
        digests.append([_digest_of_file(path) for path in inner if path.is_file()] or [masked(entry)])
    return digests


def _is_read_for_digest(entry: str) -> bool:
    """Whether what an entry holds is known only from its rows: a data set of the hub, or a suite."""
    return dataset_name(entry) is not None or suite_name(entry) is not None


def _digest_of_file(path: Path) -> str:
    status = path.stat()
    return _digest_of_state(path.absolute(), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@functools.lru_cache(maxsize=4096)
def _digest_of_state(path: Path, *_state: int) -> str:
    with open(path, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _digest_of_rows(part: ArrowPart | RowsPart) -> str:
    """The digest of the list of all rows, as Python writes it, without having all of it in memory."""
    hashed = hashlib.sha256(b"[")
    for number, batch in enumerate(part.arrow().to_batches(max_chunksize=1024)):
        hashed.update((", " * (number > 0)).encode() + repr(batch.to_pylist())[1:-1].encode())
    hashed.update(b"]")
    return hashed.hexdigest()


def _read(entry: str, key: str) -> list[ArrowPart] | list[RowsPart] | list[ArrowPart | RowsPart]:
    if (suite := suite_name(entry)) is not None:
        from hybridrl.data.suites import read_suite

        return [read_suite(suite, key)]
    dataset = dataset_name(entry)
    if dataset is not None:
        texts = _text_files_of(dataset, entry, key)
        if texts:
            return [_read_file(DataFile(Path(text).expanduser(), text), key) for text in texts]
        return [_read_dataset(dataset, entry, key)]
    files = files_of(entry, key)
    if not files:
        place = Path(without_file_scheme(entry)).expanduser().absolute()
        raise DataError(
            f"{key}={entry}: no such file (looked for {place}). Check the path, or make it with "
            "hybridrl.data.preprocess. A data set of the hub is named ORG/NAME or ORG/NAME@CONFIG:SPLIT."
        )
    return [_read_file(file, key) for file in files]


def _read_file(file: DataFile, key: str) -> ArrowPart | RowsPart:
    path = file.path
    if path.is_dir():
        inside = sorted(
            {
                f"*{''.join(f.suffixes[-2:] if f.suffix in COMPRESSIONS else f.suffixes[-1:])}"
                for f in path.iterdir()
                if format_of(f) in FORMATS
            }
        )
        example = f" Name the files in it: {key}={path / inside[0]}" if inside else ""
        raise DataError(f"{key}={file} is a directory.{example or f' Name a file: {key}=FILE'}")
    kind = format_of(path)
    if kind not in FORMATS or (kind == ".parquet" and path.suffix != kind):
        remedy = _REMEDIES.get(path.suffix.lower(), "")
        raise DataError(f"{key}={file}: unknown kind of file {path.suffix!r}. Allowed are {_ALLOWED}.{remedy}")
    if path.stat().st_size == 0:
        raise DataError(f"{key}={file}: the file is empty (0 bytes). Write it again.")
    part = _READERS[kind](file, key)
    if len(part) == 0:
        raise DataError(f"{key}={file}: the file has no rows. Write it again, or leave it out of {key}.")
    return part


def _read_parquet(file: DataFile, key: str) -> ArrowPart:
    import pyarrow
    import pyarrow.parquet

    try:
        check_column_names(pyarrow.parquet.read_schema(file.path).names, f"{key}={file}")
        return ArrowPart(file.name, pyarrow.parquet.read_table(file.path))
    except (pyarrow.ArrowException, OSError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{key}={file}: cannot be read as parquet ({first_line}). The file is damaged or of another kind; write it "
            "again."
        ) from error


def _unpack_zstd(content: bytes) -> bytes:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.BufferReader(content), "zstd").read()


def _unpack_streams(decompressor: Callable[[], Any], content: bytes) -> bytes:
    """Decompress one stream after the other. The standard library stops at one that it cannot read, without a word.

    Raises:
        OSError, EOFError, lzma.LZMAError: a stream is damaged or incomplete.
    """
    parts = []
    while content:
        stream = decompressor()
        parts.append(stream.decompress(content))
        if not stream.eof:
            raise EOFError("the compressed data ended before the end-of-stream marker was reached")
        content = stream.unused_data.lstrip(b"\0")  # padding after a stream
    return b"".join(parts)


_UNPACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".bz2": functools.partial(_unpack_streams, bz2.BZ2Decompressor),
    ".xz": functools.partial(_unpack_streams, lzma.LZMADecompressor),
    ".zst": _unpack_zstd,
}


def _text(file: DataFile, key: str) -> str:
    """Return the text of a file, decompressed as its suffix says."""
    try:
        content = file.path.read_bytes()
    except OSError as error:
        raise DataError(f"{key}={file}: cannot be read ({error.strerror or error}).") from error
    if file.path.suffix in _UNPACK:
        try:
            content = _UNPACK[file.path.suffix](content)
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            raise DataError(
                f"{key}={file}: cannot be decompressed as {file.path.suffix} ({error}). The file is damaged or of "
                "another kind; write it again."
            ) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{key}={file}: cannot be read as UTF-8 text ({error}).") from error


def _read_json(file: DataFile, key: str) -> RowsPart:
    """Read a JSON file. One that begins with `[` is a list of rows; any other holds one row per line."""
    text, reader = _text(file, key), _JsonReader()
    if text.lstrip().startswith("["):
        try:
            rows = reader.value(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{key}={file}, line {error.lineno}: not valid JSON ({error.msg}).") from error
        except (_RepeatedNameError, NoNumberError) as error:
            raise DataError(f"{key}={file}: {error}.") from None
        except (RecursionError, ValueError) as error:
            raise DataError(f"{key}={file}: {_unreadable(error)}.") from None
        lines = None
    else:
        rows, lines = _read_json_lines(file, text, key, reader)
    reader.report(file, key, is_one_text=lines is None)
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            where = f"item {index}" if lines is None else f"line {lines[index]}"
            raise DataError(f"{key}={file}, {where}: a row must be a JSON object, found {type(row).__name__}.")
    return RowsPart(file.name, rows, lines)


def _read_json_lines(file: DataFile, text: str, key: str, reader: _JsonReader) -> tuple[list[Any], list[int]]:
    rows, lines = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(reader.value(line, number))
        except json.JSONDecodeError as error:
            raise DataError(
                f"{key}={file}, line {number}: not valid JSON ({error.msg}). A file holds one JSON object a line, or "
                "one list of them."
            ) from error
        except (_RepeatedNameError, NoNumberError) as error:
            raise DataError(f"{key}={file}, line {number}: {error}.") from None
        except (RecursionError, ValueError) as error:
            raise DataError(f"{key}={file}, line {number}: {_unreadable(error)}.") from None
        lines.append(number)
    return rows, lines


class _JsonReader:
    """Reads the JSON texts of a file; NaN, which Python writes for a missing value, becomes null.

    Attributes:
        lines: the lines with NaN, once for each.
    """

    def __init__(self) -> None:
        self.lines: list[int] = []

    def value(self, text: str, line: int = 1) -> Any:
        """Return the value of a JSON text.

        Raises:
            _RepeatedNameError: an object has a name twice.
            NoNumberError: a number is infinite.
            ValueError, RecursionError: it cannot be read for another reason.
        """
        return finite_json(text, on_nan=lambda: self.lines.append(line), object_pairs_hook=_object)

    def report(self, file: DataFile, key: str, is_one_text: bool) -> None:
        """Say how many NaN there are."""
        if self.lines:
            first = "" if is_one_text else f", first in line {self.lines[0]}"
            notify(
                f"{key}={file}: NaN stands {len(self.lines)} times in the file{first}, and is read as a missing value "
                "(null)",
                "warning",
            )


class _RepeatedNameError(Exception):
    """An object has two values of one name; the message completes "line 3: ..."."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs; `json` would take the last value of a name, and lose the others."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _RepeatedNameError(
            f"an object has {twice!r} {names.count(twice)} times, and only one value would be read; remove the others"
        )
    return row


def _unreadable(error: Exception) -> str:
    """Return why valid JSON cannot be read."""
    if isinstance(error, RecursionError):
        return "lists or objects are nested too deeply"
    return f"a number cannot be read ({error}); write it as text"


def _read_csv(file: DataFile, key: str) -> RowsPart:
    """Read a CSV or TSV file with a line of column names. Values stay text, so that 007 is not 7; empty ones are None.

    A CSV file whose first line has semicolons and no commas is separated by semicolons.

    A row is named by its first line, because quoted text may contain line breaks. Where the first line has a space
    after its commas, one after other commas is no part of a value either.
    """
    csv.field_size_limit(_MAX_FIELD)
    text, delimiter = _text(file, key), _DELIMITERS[format_of(file.path)]
    header = text.partition("\n")[0]
    if ";" in header and delimiter not in header and format_of(file.path) == ".csv":
        delimiter = ";"  # as spreadsheets write it where the comma is in numbers
    is_spaced = f"{delimiter} " in header
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True, skipinitialspace=is_spaced)
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    names: list[str] = []
    first = 1
    try:
        for fields in reader:
            if not names:
                names = _column_names(fields, file, key)
            elif fields:
                _check_joined(fields, names, f"{key}={file}, line {first}")
                if len(fields) != len(names):
                    raise DataError(
                        f"{key}={file}, line {first}: {len(fields)} fields, but the first line names {len(names)} "
                        f"columns ({', '.join(names)}). Text with commas or line breaks needs double quotes."
                    )
                rows.append({name: value or None for name, value in zip(names, fields, strict=True)})
                lines.append(first)
            first = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{key}={file}, line {first}: not valid CSV ({error}).") from error
    return RowsPart(file.name, rows, lines, text_is_number=True)


def _check_joined(fields: list[str], names: list[str], where: str) -> None:
    """Refuse a line that begins another file, which was joined to this one: its names would be read as a row.

    Raises:
        DataError: the line has the byte order mark of a file, or names the columns again.
    """
    if fields[0].startswith("\ufeff") or (len(names) > 1 and [field.strip() for field in fields] == names):
        raise DataError(
            f"{where}: another file seems to begin here ({', '.join(map(repr, fields))[:80]}), joined to the first "
            "one. Remove the line, or name the files one by one."
        )


def _column_names(fields: list[str], file: DataFile, key: str) -> list[str]:
    names = [field.strip() for field in fields]
    if not all(names) or len(set(names)) < len(names):
        raise DataError(f"{key}={file}, line 1: must name every column once, found {', '.join(map(repr, names))}.")
    return names


_READERS: dict[str, Callable[[DataFile, str], ArrowPart | RowsPart]] = {
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}


def _text_files_of(dataset: DatasetName, entry: str, key: str) -> list[str]:
    """Return the files of a split of a local folder of JSON or CSV; empty: it is something else.

    The `datasets` library finds them, and would read them by other rules: 007 as 7, and of a name that an object has
    twice one value.

    Raises:
        DataError: a slice of them, or a split that the folder does not have.
    """
    folder = Path(dataset.name)
    if not folder.is_dir() or is_saved_dataset(folder):
        return []
    import datasets

    try:
        data_files = datasets.load_dataset_builder(dataset.name, dataset.config).config.data_files or {}
    except Exception:  # `_read_dataset` says what is wrong
        return []
    files = {str(split): [str(file) for file in files] for split, files in data_files.items()}
    if not all(format_of(Path(file)) in _TEXTS for of_split in files.values() for file in of_split):
        return []
    split = dataset.split or (next(iter(files)) if len(files) == 1 else None)
    if split not in files:
        raise DataError(
            f"{key}={entry}: of a folder of JSON or CSV one whole split can be read: {', '.join(files)}. Name it, or "
            f"the files: {key}=[A,B]."
        )
    return sorted(files[split])


def _read_dataset(dataset: DatasetName, entry: str, key: str) -> ArrowPart:
    """Load one split with the `datasets` library, from the hub, its cache, or a local folder."""
    import datasets

    try:
        splits = _load(dataset)
    except Exception as error:
        # The library raises a dozen kinds of errors for the same failure: the data could not be loaded.
        text = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"{key}={entry}: no such file, and it cannot be loaded as a data set ({type(error).__name__}: {text}). "
            "Check the spelling: ORG/NAME@CONFIG:SPLIT. Without a connection to the Hugging Face hub, download the "
            f"data set elsewhere (`hf download --repo-type dataset {dataset.name}`) and name its files."
        ) from error
    if isinstance(splits, datasets.DatasetDict):
        if len(splits) != 1 and dataset.split is None:
            listed = ", ".join(splits)
            raise DataError(
                f"{key}={entry}: the data set has the splits {listed}. Name one: {key}={entry}:{next(iter(splits))}."
            )
        if dataset.split is not None and dataset.split not in splits:
            raise DataError(f"{key}={entry}: no such split; choose from {', '.join(splits)}.")
        splits = splits[dataset.split or next(iter(splits))]
    if len(splits) == 0:
        raise DataError(f"{key}={entry}: the data set has no rows.")
    return ArrowPart(entry, splits.flatten_indices().data.table)


def _load(dataset: DatasetName) -> datasets.Dataset | datasets.DatasetDict:
    import datasets

    if not is_saved_dataset(Path(dataset.name)):
        return datasets.load_dataset(dataset.name, dataset.config, split=dataset.split)
    saved = datasets.load_from_disk(dataset.name)
    if dataset.config is not None:
        raise ValueError(f"a saved data set has no configurations, so @{dataset.config} cannot be one")
    if isinstance(saved, datasets.Dataset) and dataset.split not in (None, str(saved.split)):
        raise ValueError(f"the folder holds one split, {saved.split}, and not {dataset.split}")
    return saved
