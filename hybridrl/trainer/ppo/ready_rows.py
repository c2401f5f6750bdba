"""Rows of scored groups that wait to be trained on.

A group is the rows of one `uid`: any number of rows, in any order. Rows that also share `sample` are one sample of the
prompt (a session in several turns).
"""

import threading
from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from hybridrl.algorithms.groups import Groups
from hybridrl.errors import UserError
from hybridrl.protocol import DataProto
from hybridrl.protocol.sample_names import sample_names
from hybridrl.trainer.ppo.batching import join_generated, trim

SURPLUS_FILE = "surplus.safetensors"
_CPU = torch.device("cpu")
_SAMPLES = "samples_per_prompt"  # in the meta_info of the file


class ReadyRows:
    """Keeps the batches that groups were generated in, until all of their groups are gone. Any thread may call it.

    Args:
        samples: number of samples per prompt (`rollout.n`). A checkpoint with another number is refused.
        pad_token_id: pads rows that were generated to different widths.
    """

    def __init__(self, samples: int, pad_token_id: int) -> None:
        self.samples = samples
        self.pad_token_id = pad_token_id
        self._batches: dict[int, DataProto] = {}  # by the number of the first group of the lot, in this order
        self._lock = threading.Lock()  # of changes: lots end while a step takes and forgets groups

    @property
    def uids(self) -> list[str]:
        """The groups, in the order of their first rows."""
        return list(dict.fromkeys(uid for batch in self._batches.values() for uid in _uids(batch)))

    def add(self, first_seq: int, batch: DataProto) -> None:
        """Keep complete groups.

        Args:
            first_seq: the number of the lot's first group.
            batch: all rows of the groups of a lot.
        """
        with self._lock:
            self._batches = dict(sorted([*self._batches.items(), (first_seq, batch)], key=lambda entry: entry[0]))

    def rows_of(self, uids: Collection[str]) -> DataProto:
        """Return the rows of groups as one batch, in the order in which they were generated."""
        parts, rest = [], False
        for batch in self._batches.values():
            rows = _rows(batch, uids)
            rest |= len(rows) < len(batch)
            if rows:
                parts.append(batch if len(rows) == len(batch) else batch.select_idxs(rows))
        joined = join_generated(parts, self.pad_token_id)
        # Fields that are added to the result do not appear here.
        return trim(joined.select()) if rest else joined.select()

    def remove(self, uids: Collection[str]) -> None:
        """Forget groups."""
        with self._lock:
            remaining = {}
            for first_seq, batch in self._batches.items():
                rows = _rows(batch, uids, inside=False)
                if len(rows) == len(batch):
                    remaining[first_seq] = batch
                elif rows:
                    remaining[first_seq] = trim(batch.select_idxs(rows))
            self._batches = remaining

    def clear(self) -> None:
        """Forget all groups."""
        self._batches = {}

    def save(self, folder: Path) -> None:
        """Write the rows, if there are any."""
        if self._batches:
            batch = join_generated(list(self._batches.values()), self.pad_token_id)
            meta = {**batch.meta_info, _SAMPLES: self.samples}
            DataProto(batch.batch, batch.non_tensor_batch, meta).save_to_disk(folder / SURPLUS_FILE)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote.

        Raises:
            UserError: the rows were saved with another number of samples per prompt.
        """
        path = folder / SURPLUS_FILE
        self.clear()
        if not path.exists():
            return
        surplus = DataProto.load_from_disk(path)
        # Groups may have less, down to all of them, where samples were dropped (reward.on_error=drop).
        largest = max(len(set(sample_names(surplus.select_idxs(rows)))) for rows in _rows_of_groups(surplus))
        # Files of earlier versions do not say how many there were.
        samples = int(surplus.meta_info.pop(_SAMPLES, max(largest, self.samples)))
        if samples != self.samples:
            raise UserError(
                f"{path} holds {samples} samples of each prompt that waits for the next step, and "
                f"actor_rollout_ref.rollout.n={self.samples}; resume with rollout.n={samples}"
            )
        self._batches = {-1: surplus}


def _uids(batch: DataProto) -> list[str]:
    return [str(uid) for uid in batch.non_tensor_batch["uid"].tolist()]


def _rows(batch: DataProto, uids: Iterable[str], inside: bool = True) -> list[int]:
    """Return the numbers of the rows that belong to `uids`, or with `inside=False` of the others."""
    uids = set(uids)
    return [row for row, uid in enumerate(_uids(batch)) if (uid in uids) is inside]


def _rows_of_groups(batch: DataProto) -> list[torch.Tensor]:
    """Return the row numbers of each group."""
    groups = Groups(batch.non_tensor_batch["uid"], _CPU)
    return [(groups.ids == number).nonzero().squeeze(-1) for number in range(groups.count)]
