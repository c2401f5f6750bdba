"""Log-probabilities of the reference, the model before training: computed for each batch, or once and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hybridrl.checkpoint import digest
from hybridrl.notify import notify
from hybridrl.protocol import DataProto
from hybridrl.utils.files import replacing
from hybridrl.workers.objectives import REF_LOG_PROBS

FILE = "reference_log_probs.safetensors"  # in the run's folder
_DIGEST = "made_of"

Compute = Callable[[DataProto], DataProto]


class Reference:
    """Gives each row of a batch the log-probability of its answer under the reference.

    Args:
        compute: computes it for a batch of rows.
    """

    def __init__(self, compute: Compute) -> None:
        self.compute = compute

    def add_to(self, batch: DataProto, part: str, rows: list[int]) -> DataProto:
        """Add the field `ref_answer_log_probs` [B].

        Args:
            part: `train` or `val`.
            rows: for each row of the batch the number of its row in the data.
        """
        batch.batch[REF_LOG_PROBS] = self.compute(batch).batch[REF_LOG_PROBS]
        return batch


class CachedReference(Reference):
    """A reference whose log-probabilities were computed before the first step, and are kept in the run's folder.

    Args:
        compute: see `Reference`; it is called while the model has not been trained.
        folder: the run's folder.
        made_of: plain data that identifies the model and the settings that it is computed with.
        rows_together: rows of a batch that belong to one row of the data.
    """

    def __init__(self, compute: Compute, folder: Path, made_of: Mapping[str, Any], rows_together: int) -> None:
        super().__init__(compute)
        self._together = rows_together
        self._path = folder / FILE
        self._made_of = made_of
        self._log_probs: dict[str, dict[int, torch.Tensor]] = {}

    def prepare(self, parts: Mapping[str, tuple[Any, Callable[[], Iterable[tuple[DataProto, list[int]]]]]]) -> None:
        """Read the file of an earlier start of this run, or compute and write it.

        Args:
            parts: for `train` and `val` the data set, and a function that yields its batches, with the number of the
                pair of each row.
        """
        made_of = digest({**self._made_of, **{part: _digest_of(dataset) for part, (dataset, _) in parts.items()}})
        log_probs = self._read(made_of)
        if log_probs is None:
            total = sum(len(dataset) for dataset, _ in parts.values())
            notify(f"computing the reference's log-probabilities of {total} rows, kept in {self._path}")
            log_probs = {part: self._computed(batches()) for part, (_, batches) in parts.items()}
            self._write(log_probs, made_of)
        for part, tensors in log_probs.items():
            self._log_probs[part] = dict(zip(tensors["rows"].tolist(), tensors["log_probs"], strict=True))

    def add_to(self, batch: DataProto, part: str, rows: list[int]) -> DataProto:
        log_probs = self._log_probs[part]
        batch.batch[REF_LOG_PROBS] = torch.stack([log_probs[row] for row in rows[:: self._together]]).flatten()
        return batch

    def _computed(self, batches: Iterable[tuple[DataProto, list[int]]]) -> dict[str, torch.Tensor]:
        rows: list[int] = []
        log_probs = []
        for batch, numbers in batches:
            rows += numbers[:: self._together]
            log_probs.append(self.compute(batch).batch[REF_LOG_PROBS].view(-1, self._together))
        return {"rows": torch.tensor(rows), "log_probs": torch.cat(log_probs)}

    def _read(self, made_of: str) -> dict[str, dict[str, torch.Tensor]] | None:
        if not self._path.is_file():
            return None
        try:
            with safe_open(str(self._path), framework="pt") as stored:
                if (stored.metadata() or {}).get(_DIGEST) != made_of:
                    notify(f"{self._path} is of another model or other data, and is computed again", "warning")
                    return None
                log_probs: dict[str, dict[str, torch.Tensor]] = {}
                for name in stored.keys():
                    part, _, name_in_part = name.partition(".")
                    log_probs.setdefault(part, {})[name_in_part] = stored.get_tensor(name)
                return log_probs
        except (SafetensorError, OSError) as error:
            notify(f"{self._path} cannot be read ({error}), and is computed again", "warning")
            return None

    def _write(self, log_probs: Mapping[str, Mapping[str, torch.Tensor]], made_of: str) -> None:
        flat = {f"{part}.{name}": tensor for part, tensors in log_probs.items() for name, tensor in tensors.items()}
        with replacing(self._path) as temporary:
            save_file(flat, temporary, metadata={_DIGEST: made_of})


def _digest_of(dataset: Any) -> str:
    """A digest of all rows of a data set."""
    import hashlib

    total = hashlib.sha256()
    for item in range(len(dataset)):
        total.update(json.dumps(dataset[item], default=_plain).encode())
    return total.hexdigest()


def _plain(value: Any) -> Any:
    """Images and their positions as something that JSON holds and that differs where they do."""
    return _digest_of_tensor(value) if isinstance(value, torch.Tensor) else str(value)


def _digest_of_tensor(tensor: torch.Tensor) -> str:
    """A digest of a tensor's values."""
    import hashlib

    return hashlib.sha256(tensor.contiguous().numpy().data).hexdigest()
