"""Token ids of prompts, kept in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_CACHED_TOKENS = (
    50_000_000  # token ids kept in memory (int32: 200 MB); with more, prompts are tokenised again when drawn
)


class TokenCache:
    """Ragged token ids in one flat array. Nothing is kept once there are more than `limit`."""

    def __init__(self, limit: int = _CACHED_TOKENS) -> None:
        self.limit = limit
        self.lengths: list[int] = []
        self._chunks: list[np.ndarray] = []
        self._total = 0
        self._flat: np.ndarray | None = None
        self._starts: np.ndarray | None = None

    def add(self, sequences: Sequence[list[int]]) -> None:
        """Append sequences."""
        self.lengths.extend(map(len, sequences))
        self._total += sum(map(len, sequences))
        if self._total > self.limit:
            self._chunks = []
        else:
            self._chunks.extend(np.asarray(ids, dtype=np.int32) for ids in sequences)

    def freeze(self) -> None:
        """Finish the cache. Called once, after the last `add`."""
        if self._total <= self.limit:
            self._flat = np.concatenate(self._chunks) if self._chunks else np.empty(0, np.int32)
            self._starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._chunks = []

    def get(self, index: int) -> list[int] | None:
        """Return the ids of one sequence, or None if there were too many to keep."""
        if self._flat is None or self._starts is None:
            return None
        return self._flat[self._starts[index] : self._starts[index + 1]].tolist()
