"""In which order rows are seen."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class EpochSampler(Sampler[int]):
    """All rows once an epoch: in file order, or in a permutation that depends on `(seed, epoch)` and nothing else.

    So epoch 7 has the same order in a run that started there as in one that came through the six before.

    Args:
        size: number of rows.
        shuffle: permute; otherwise file order.
        seed: seed of the permutations.
    """

    def __init__(self, size: int, shuffle: bool, seed: int) -> None:
        self.size = size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.size))
        return iter(np.random.default_rng([self.seed, self.epoch]).permutation(self.size).tolist())

    def __len__(self) -> int:
        return self.size
