"""DataProtoFuture: a batch that workers are still computing, which the controller passes on unread."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

from hybridrl.protocol.dataproto import DataProto
from hybridrl.protocol.functions import concat_tensordict

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True)
class _Chunk:
    """Takes chunk `index` of `chunks` of a batch."""

    index: int
    chunks: int

    def __call__(self, data: Any) -> Any:
        return data.chunk(self.chunks)[self.index]


@dataclass
class DataProtoFuture:
    """The pending output of a worker group.

    A future can be passed to another group's method like a DataProto: `chunk` makes one future per worker, and each
    worker calls `get` itself, so the data never passes through the controller.

    Attributes:
        collect_fn: joins the list of the futures' values into one DataProto.
        futures: the object references of the workers that return a part.
        dispatch_fn: takes this future's share of the joined batch; None takes the whole.
        fields: all fields that the batch may have, as its worker method declares; None: it declares none.
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: list[ray.ObjectRef]
    dispatch_fn: Callable[[Any], Any] | None = None
    fields: frozenset[str] | None = None

    @staticmethod
    def concat(data: list[ray.ObjectRef]) -> DataProtoFuture:
        """Return the future of the concatenation of the values of `data`, in order."""
        return DataProtoFuture(collect_fn=DataProto.concat, futures=data)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Return one future for each of `chunks` parts, as `DataProto.chunk` would cut the value. Does not block."""
        if self.dispatch_fn is not None:
            raise ValueError("this future is a part of a batch already; chunk the future of the whole batch")
        if chunks < 1:
            raise ValueError(f"chunks must be at least 1, found {chunks}")
        return [DataProtoFuture(self.collect_fn, self.futures, _Chunk(index, chunks)) for index in range(chunks)]

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the parts, join them and take this future's share.

        Args:
            timeout: seconds to wait at most; None waits forever.

        Returns:
            A DataProto; a TensorDict if the workers returned these.

        Raises:
            ray.exceptions.GetTimeoutError: the parts did not arrive in time.
            TypeError: a part is neither.
        """
        import ray

        parts = ray.get(self.futures, timeout=timeout)
        if self.collect_fn is DataProto.concat and all(isinstance(part, TensorDict) for part in parts):
            whole: Any = concat_tensordict(parts)
            return whole if self.dispatch_fn is None else self.dispatch_fn(whole)
        for position, part in enumerate(parts):
            if self.collect_fn is DataProto.concat and not isinstance(part, DataProto):
                raise TypeError(
                    f"part {position} of a DataProtoFuture is {type(part).__name__}; a worker method whose result is "
                    "collected as DataProto must return one on every rank that collects"
                )
        if self.collect_fn is DataProto.concat and isinstance(self.dispatch_fn, _Chunk):
            return _chunk_of_parts(parts, self.dispatch_fn)
        value = self.collect_fn(parts)
        return value if self.dispatch_fn is None else self.dispatch_fn(value)


def _chunk_of_parts(parts: list[DataProto], share: _Chunk) -> DataProto:
    """Return `share(DataProto.concat(parts))`, joining only the rows that it needs."""
    padded = any(part.is_padding_enabled() for part in parts)
    start, stop = DataProto.chunk_bounds(sum(map(len, parts)), share.chunks, padded)[share.index]
    pieces, first = [], 0
    for part in parts:
        low, high = max(start - first, 0), min(stop - first, len(part))
        pieces.append(part.slice(low, max(low, high)) if (low, high) != (0, len(part)) else part)
        first += len(part)
    needed = [part for part in pieces if len(part)] or pieces[:1]
    # Rows from a single part are not copied: they stay in read-only shared memory, like all arguments sent through Ray.
    joined = copy.copy(needed[0]) if len(needed) == 1 else DataProto.concat(needed)
    joined.meta_info = DataProto.merged_meta_info(parts)
    return joined
