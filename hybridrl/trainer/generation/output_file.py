"""The output file and its parts. Each is written completely or not at all.

Parts are kept in `OUTPUT.parts/` next to the output. When the last part is written, the parts are joined and the folder
is removed. The output and its parts record the settings they were made with, so that responses made with other settings
are neither mixed in nor taken as finished.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hybridrl.checkpoint import CheckpointError, load_json, save_json
from hybridrl.checkpoint.lock import hold
from hybridrl.errors import UserError
from hybridrl.utils.files import replacing

SETTINGS = b"hybridrl.generation"
_SETTINGS_FILE = "settings.json"


@dataclass(frozen=True)
class Response:
    """One response as it is stored. Unknown fields are None."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    tokens: int | None
    token_ids: list[int] | None = None
    log_probs: list[float] | None = None


class OutputFile:
    """The output file of a generation run.

    Args:
        path: `data.output_path`.
        rows: the input rows that get responses, in order.
        batch_size: rows per part.
        key: `data.response_key`, the name of the response column and the prefix of the other new columns.
        log_probs: whether tokens and their log-probabilities are stored.
        settings: everything that the responses depend on, as plain data.
        overwrite: `data.overwrite`.

    Raises:
        UserError: the input already has such a column, or the output or parts of it exist and were made with other
            settings, or another process is writing it.
    """

    def __init__(
        self,
        path: Path,
        rows: pa.Table,
        batch_size: int,
        key: str,
        log_probs: bool,
        settings: Mapping[str, Any],
        overwrite: bool = False,
    ) -> None:
        self.path = path
        self.rows = rows
        self.batch_size = batch_size
        self.settings = dict(settings)
        self.fields = _fields(key, log_probs)
        self.folder = parts_folder(path)
        clashing = [name for name in self.fields if name in rows.column_names]
        if clashing:
            raise UserError(
                f"data.path has a column {clashing[0]!r} already, which the responses would replace; set "
                f"data.response_key to another name than {key!r}"
            )
        self.is_complete = self._look_at_output(overwrite)
        if self.is_complete:
            shutil.rmtree(self.folder, ignore_errors=True)  # left by a run that was killed just before
        else:
            self._claim(overwrite)

    def __len__(self) -> int:
        """Return the total number of parts."""
        return -(-self.rows.num_rows // self.batch_size)

    def rows_of(self, number: int) -> range:
        """Return the rows of a part, as positions in `rows`."""
        return range(number * self.batch_size, min((number + 1) * self.batch_size, self.rows.num_rows))

    def missing(self) -> list[int]:
        """Return the numbers of the parts that are not written yet."""
        return [number for number in range(len(self)) if not self._part(number).exists()]

    def write(self, number: int, responses: Sequence[Sequence[Response]]) -> None:
        """Write a part: the responses to each of its rows."""
        rows = self.rows_of(number)
        table = self.rows.slice(rows.start, len(rows))
        for name, (attribute, kind) in self.fields.items():
            if attribute == "prompt_tokens":
                values: list[Any] = [of_row[0].prompt_tokens for of_row in responses]
            else:
                values = [[getattr(response, attribute) for response in of_row] for of_row in responses]
            table = table.append_column(pa.field(name, kind), pa.array(values, type=kind))
        with replacing(self._part(number)) as temporary:
            pq.write_table(table, temporary)

    def join(self) -> None:
        """Join the parts into the output and remove them. Only one part is in memory at a time."""
        schema = pq.read_schema(self._part(0))
        made_by = {SETTINGS: json.dumps(self.settings, sort_keys=True).encode()}
        schema = schema.with_metadata((schema.metadata or {}) | made_by)
        with replacing(self.path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
            for number in range(len(self)):
                writer.write_table(pq.read_table(self._part(number)).replace_schema_metadata(schema.metadata))
        self.is_complete = True
        shutil.rmtree(self.folder, ignore_errors=True)

    def _part(self, number: int) -> Path:
        return self.folder / f"part_{number:06d}.parquet"

    def _look_at_output(self, overwrite: bool) -> bool:
        """Return whether the output exists and was made with these settings."""
        if not self.path.exists():
            return False
        try:
            made_by = (pq.read_schema(self.path).metadata or {}).get(SETTINGS)
        except (pa.ArrowException, OSError):
            made_by = None
        if made_by is not None and json.loads(made_by) == self._plain:
            return True
        if not overwrite:
            reason = "is not an output of main_generation"
            if made_by is not None:
                reason = self._differences(json.loads(made_by))
            raise UserError(
                f"data.output_path={self.path} is there and {reason}. Name another file, or set data.overwrite=True"
            )
        return False

    def _claim(self, overwrite: bool) -> None:
        """Claim the folder of the parts for this process and these settings."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"data.output_path={self.path}: its folder cannot be made ({error})") from error
        try:
            hold(self.folder)
        except CheckpointError as error:
            raise UserError(
                f"another process is generating into data.output_path={self.path}: wait for it, stop it, or name "
                f"another file ({str(error).split(':')[0]})"
            ) from error
        file = self.folder / _SETTINGS_FILE
        if file.exists():
            before = load_json(file)
            if before != self._plain:
                if not overwrite:
                    raise UserError(
                        f"{self.folder} holds parts of a run that was not finished, which {self._differences(before)}. "
                        "Finish it with its settings, name another data.output_path, or set data.overwrite=True"
                    )
                for part in self.folder.glob("part_*.parquet"):
                    part.unlink()
        for partial in self.folder.glob(".part_*.tmp"):
            partial.unlink()
        save_json(file, self._plain)

    @property
    def _plain(self) -> Any:
        """The settings as they look after a JSON round trip."""
        return json.loads(json.dumps(self.settings))

    def _differences(self, before: Mapping[str, Any]) -> str:
        now = self._plain
        names = [name for name in now if before.get(name) != now[name]]
        named = "; ".join(f"{name} was {_short(before.get(name))}, is {_short(now[name])}" for name in names)
        return f"was made with other settings ({named})"


def parts_folder(path: str | Path) -> Path:
    """Return the folder that holds the parts of an output while it is written."""
    path = Path(path).expanduser()
    return path.with_name(f"{path.name}.parts")


def _fields(key: str, log_probs: bool) -> dict[str, tuple[str, pa.DataType]]:
    """Map each column to its attribute of `Response` and its type."""
    fields: dict[str, tuple[str, pa.DataType]] = {
        key: ("text", pa.list_(pa.string())),
        f"{key}_finish_reasons": ("finish_reason", pa.list_(pa.string())),
        f"{key}_tokens": ("tokens", pa.list_(pa.int64())),
        f"{key}_prompt_tokens": ("prompt_tokens", pa.int64()),
    }
    if log_probs:
        fields[f"{key}_log_probs"] = ("log_probs", pa.list_(pa.list_(pa.float32())))
        fields[f"{key}_token_ids"] = ("token_ids", pa.list_(pa.list_(pa.int64())))
    return fields


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
