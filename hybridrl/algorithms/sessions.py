"""Sessions of several trajectories: an agent whose context was truncated produces one session in several rows.

Legend: B rows, T response tokens; S sessions of at most K rows each.

The rows of a session are one trajectory of the policy. They are joined end to end, in order, for the estimator, which
already supports masks with holes, and the result is split again. A session therefore counts once in its group, and
each of its tokens gets the credit that it has in the whole session. Losses that average over sequences count it once
too (`sequence_lengths` of `agg_loss`), and losses with a value per sequence read all of its rows
(`algorithms.sequences`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.groups import Groups
from hybridrl.errors import AlgorithmError

SESSION_KEY = "session_id"
ORDER_KEY = "trajectory_index"
_T = TypeVar("_T")


class BatchWithColumns(Protocol):
    """A batch, such as `hybridrl.protocol.DataProto`."""

    non_tensor_batch: dict[str, np.ndarray]

    def __len__(self) -> int: ...

    def cached(self, name: str, columns: Sequence[str], make: Callable[[], _T]) -> _T:
        """Return the value of `make`, which the batch keeps as long as it has the columns."""


class Sessions:
    """The position of each row in its session."""

    def __init__(self, non_tensors: Mapping[str, Any], rows: int) -> None:
        session = np.asarray(non_tensors[SESSION_KEY], dtype=object)
        uid = np.asarray(non_tensors.get("uid", np.zeros(rows)), dtype=object)
        if len(session) != rows:
            raise AlgorithmError(f"{SESSION_KEY} has {len(session)} entries for {rows} rows; it needs one per row.")
        # A session belongs to one prompt: the uid distinguishes ids that are unique only within a prompt.
        keys = np.fromiter(zip(uid.tolist(), session.tolist(), strict=True), dtype=object, count=rows)
        self.groups = Groups(keys, torch.device("cpu"))
        order = non_tensors.get(ORDER_KEY)
        turn = np.arange(rows) if order is None else np.asarray(order, dtype=np.int64)
        ids = self.groups.ids.numpy()
        ranked = np.lexsort((turn, ids))
        starts = np.zeros(self.groups.count, dtype=np.int64)
        starts[1:] = np.cumsum(self.groups.sizes.numpy().astype(np.int64))[:-1]
        place = np.empty(rows, dtype=np.int64)
        place[ranked] = np.arange(rows) - starts[ids[ranked]]
        self.place = torch.from_numpy(place)
        self.longest = int(self.groups.sizes.max()) if rows else 0
        self.last = torch.from_numpy(ranked[np.append(starts[1:], rows) - 1] if rows else ranked)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of each session's rows: [B] -> [S]."""
        return values.new_zeros(self.groups.count).index_add(0, self.groups.ids.to(values.device), values)

    def join(self, values: Tensor) -> Tensor:
        """[B, T] -> [S, K T], absent rows zero; [B] -> [S], the session's last row."""
        if values.dim() == 1:
            return values[self.last.to(values.device)]
        ids, place = self.groups.ids.to(values.device), self.place.to(values.device)
        joined = values.new_zeros((self.groups.count, self.longest, *values.shape[1:]))
        joined[ids, place] = values
        return joined.flatten(1, 2)

    def split(self, joined: Tensor, width: int) -> Tensor:
        """[S, K T] -> [B, T]: each row gets its part."""
        parts = joined.unflatten(1, (self.longest, width))
        return parts[self.groups.ids.to(joined.device), self.place.to(joined.device)]

    def totals(self, values: Any) -> Any:
        """Return the sum of a non-tensor field over each session's rows, without None; None where all are None."""
        sums = np.full(self.groups.count, None, dtype=object)
        for session, value in zip(self.groups.ids.tolist(), values, strict=True):
            if value is not None:
                sums[session] = value if sums[session] is None else sums[session] + value
        return sums

    def pick(self, values: Any) -> Any:
        """Return a non-tensor field per session: the value of its last row."""
        return np.asarray(values, dtype=object)[self.last.numpy()]


def split_sessions(non_tensors: Mapping[str, Any], rows: int) -> Sessions | None:
    """Return the sessions of a batch; None if each row is a session of its own."""
    if SESSION_KEY not in non_tensors:
        return None
    sessions = Sessions(non_tensors, rows)
    return sessions if sessions.longest > 1 else None


def sessions_of(batch: BatchWithColumns) -> Sessions | None:
    """Return the sessions of a batch, which keeps them; None if each row is a session of its own."""
    columns = batch.non_tensor_batch
    return batch.cached("sessions", (SESSION_KEY, ORDER_KEY, "uid"), lambda: split_sessions(columns, len(batch)))
