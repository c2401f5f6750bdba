"""JSON state, streamed hashes, and folder listings."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from hybridrl.errors import CheckpointError
from hybridrl.utils.files import write_text

_T = TypeVar("_T")


def save_json(path: Path, state: Any) -> None:
    """Write plain data (dicts with string keys, lists, numbers, strings, booleans, None) atomically as JSON.

    Floats survive exactly, including NaN and infinities (Python's JSON dialect). The state is checked to survive the
    round trip unchanged. A tuple or an integer key would not, and that would show only at resume.

    Raises:
        TypeError: the state has something that JSON cannot hold; the error names its place.
    """
    _check_plain(state, Path(path).stem)
    write_text(path, json.dumps(state, indent=1, ensure_ascii=False))


def _check_plain(value: Any, where: str) -> None:
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return
    if type(value) is list:
        for i, entry in enumerate(value):
            _check_plain(entry, f"{where}[{i}]")
    elif type(value) is dict:
        for key, entry in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r} ({type(key).__name__}); JSON keys are strings")
            _check_plain(entry, f"{where}.{key}")
    else:
        raise TypeError(f"{where} is {type(value).__name__}, which JSON would not bring back as it is")


def load_json(path: Path) -> Any:
    """Read what `save_json` wrote.

    Raises:
        CheckpointError: there is no such file, it cannot be read, or its content is not JSON; the error names the file
            and the reason.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete, or not ours") from exc
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path} is no valid JSON ({exc}): the file is corrupt") from exc


def digest(state: Any) -> str:
    """Return the sha256 of plain data, independent of the order of keys (`config_digest` of a `RunStore`)."""
    text = json.dumps(state, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def sha256(path: Path) -> str:
    """Return the hex digest of a file's content, which is read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def in_threads(function: Callable[[Path], _T], paths: Iterable[Path]) -> list[_T]:
    """Call `function` on each path, several at a time. Hashing and fsync release the interpreter lock."""
    paths = list(paths)
    if len(paths) < 2:
        return [function(path) for path in paths]
    with ThreadPoolExecutor(max_workers=min(len(paths), max(2, (os.cpu_count() or 2)))) as pool:
        return list(pool.map(function, paths))


def walk(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return every file and every folder below `folder`, sorted, without the folder itself.

    Raises:
        CheckpointError: there is a symbolic link or special file, whose content a hash of this folder would not cover.
    """
    files: list[Path] = []
    folders: list[Path] = []
    for path in sorted(Path(folder).rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path} is a link or a special file; a checkpoint holds plain files only: copy it")
        (folders if path.is_dir() else files).append(path)
    return files, folders
