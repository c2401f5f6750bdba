"""JSON lines: one complete, strictly valid JSON object per line, whatever happens to the process.

Numbers that JSON does not have are written as the strings "NaN", "Infinity" and "-Infinity". Every JSON reader accepts
such a file, and equal values compare equal.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hybridrl.errors import UserError
from hybridrl.utils.files import explaining_full_disk, replacing

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(value: Any) -> Any:
    """Convert `value` to JSON data: NumPy and torch values to numbers and lists, unknown objects to their text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return writable(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return plain(value.tolist())
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {writable(str(key)): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry) for entry in value]
    if hasattr(value, "detach") and hasattr(value, "tolist"):
        return plain(value.detach().tolist())
    return writable(str(value))


def writable(text: str) -> str:
    """Return text that every file can hold: lone surrogates, which UTF-8 does not have, become escapes (`\\udc80`)."""
    return str(text).encode("utf-8", "backslashreplace").decode("utf-8")


def encode(record: Mapping[str, Any]) -> str:
    """Encode one line, without the newline."""
    return json.dumps(plain(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def number(value: Any) -> float | None:
    """Return a number read from a line, including NaN and infinities; None if the value is not a number."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return float(value)
    return _SPECIAL.get(value) if isinstance(value, str) else None


class JsonLines:
    """Appends records to a file. An incomplete last line, left by a killed process, is removed first."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_incomplete_end(self.path)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (open during the whole run)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record. The line is on the disk when this returns.

        Raises:
            UserError: the file was removed or replaced, so that the line would be lost.
            DiskFullError: there is no space left.
        """
        self._check_in_place()
        with explaining_full_disk(self.path):
            self._file.write(encode(record) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def _check_in_place(self) -> None:
        ours = os.fstat(self._file.fileno())
        try:
            on_disk = os.stat(self.path)
        except OSError:
            on_disk = None
        if on_disk is None or (on_disk.st_dev, on_disk.st_ino) != (ours.st_dev, ours.st_ino):
            raise UserError(
                f"{self.path} was {'removed' if on_disk is None else 'replaced'} while the run writes it: what the run "
                "still writes would be lost. Leave the run's folder in place while it runs, and start the run again"
            )

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


def _drop_incomplete_end(path: Path) -> None:
    if not path.exists():
        return
    with open(path, "rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            block = file.read(end - start)
            newline = block.rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def read(path: Path) -> list[dict[str, Any]]:
    """Read every record of a file. A last line without a newline is ignored.

    Raises:
        UserError: a line is not a JSON object; the error names file and line.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    records = []
    for i, line in enumerate(text.split("\n")[:-1], 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as exc:
            raise UserError(f"{path}, line {i} is no JSON ({exc}): remove the line, or the file") from exc
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {i} holds {type(record).__name__} instead of an object: remove the line")
        records.append(record)
    return records


def keep_records(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a file atomically with the records for which `keep` is true. Lines are kept byte for byte."""
    if not Path(path).exists():
        return
    records = read(path)
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    with replacing(path) as temporary:
        temporary.write_text(
            "".join(line + "\n" for line, record in zip(lines, records, strict=False) if keep(record)),
            encoding="utf-8",
        )
