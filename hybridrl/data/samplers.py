"""The order in which rows are drawn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class EpochSampler(Sampler[int]):
    """Yields all rows once per epoch: in file order, or in a permutation that depends only on `(seed, epoch)`.

    Epoch 7 therefore has the same order in a run that resumed there as in an uninterrupted run.

    Args:
        size: number of rows.
        shuffle: whether to permute the rows; otherwise they are in file order.
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
