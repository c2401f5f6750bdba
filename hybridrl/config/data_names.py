"""Entries of `data.train_files`, `data.val_files` and `data.path`: a file, glob, address, data set of the hub, suite.

Imported by the configuration's checks, so it reads nothing but folder listings.
"""

import glob
import re
from dataclasses import dataclass
from pathlib import Path

from hybridrl.utils.urls import is_remote, without_file_scheme

#: kinds of data files
FORMATS = (".parquet", ".json", ".jsonl", ".csv", ".tsv")
#: text files may be compressed
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
KINDS = "parquet, json, jsonl, csv or tsv"

_DATASET = re.compile(r"(?P<name>[^:@]+)(@(?P<config>[^:@]+))?(:(?P<split>.+))?")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class DatasetName:
    """A data set that the `datasets` library loads: `NAME@CONFIG:SPLIT`, the last two optional.

    Attributes:
        name: a hub id `ORG/NAME`, or a local folder.
        config: one of the data set's configurations; None if it has only one.
        split: one of its splits; None if it has only one.
    """

    name: str
    config: str | None
    split: str | None


@dataclass(frozen=True)
class SuiteName:
    """A benchmark suite as an entry: `suite:NAME@PLACE`, the last part optional.

    Attributes:
        name: in `hybridrl.registry.SUITES`.
        place: a file, glob, folder or data set with its rows; None: its data set on the hub.
    """

    name: str
    place: str | None


_SUITE = "suite:"


def suite_name(entry: str) -> SuiteName | None:
    """Return the suite that an entry names; None if it names something else."""
    if not entry.startswith(_SUITE) or Path(entry).exists():
        return None
    name, _, place = entry.removeprefix(_SUITE).partition("@")
    return SuiteName(name, place or None)


def suite_entry(name: str, place: str | None) -> str:
    """Return the entry that names a suite."""
    return f"{_SUITE}{name}" + ("" if place is None else f"@{place}")


def format_of(path: Path) -> str:
    """Return the suffix that says the format, without that of the compression; "" if the file has none."""
    return path.with_suffix("").suffix if path.suffix in COMPRESSIONS else path.suffix


def local_files(entry: str) -> list[str]:
    """Return the files that an entry names on this machine, sorted where it is a glob; empty if there are none."""
    if suite_name(entry) is not None or is_remote(entry):
        return []
    entry = without_file_scheme(entry)
    path = Path(entry).expanduser()
    if path.exists():
        return [entry]
    return sorted(file for file in glob.glob(str(path), recursive=True) if Path(file).is_file())


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote a folder."""
    return (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()


def dataset_name(entry: str) -> DatasetName | None:
    """Return the data set that an entry names; None if it names a file.

    A file or folder of exactly this name is itself, and a folder that `Dataset.save_to_disk` wrote is a data set.
    Without a split, `ORG/NAME` is a hub id unless it ends like a file or `ORG` is a folder here, in which a file of
    this name was expected.
    """
    if suite_name(entry) is not None or is_remote(entry):
        return None
    entry = without_file_scheme(entry)
    path = Path(entry).expanduser()
    if is_saved_dataset(path):
        return DatasetName(str(path), None, None)
    if path.exists():
        return None
    match = _DATASET.fullmatch(entry)
    if match is None:
        return None
    name, folder = match["name"], Path(match["name"]).expanduser()
    is_qualified = bool(match["split"] or match["config"])
    is_hub_id = _HUB_ID.fullmatch(name) is not None and format_of(folder) not in FORMATS
    if not (is_hub_id and (is_qualified or not folder.parent.is_dir())) and not (is_qualified and folder.is_dir()):
        return None
    return DatasetName(str(folder) if folder.is_dir() else name, match["config"], match["split"])
