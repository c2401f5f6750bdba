"""`verl.experimental.dataset.sampler`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sized
from typing import Any

from torch.utils.data import Sampler

__all__ = ["AbstractCurriculumSampler", "AbstractSampler"]


class AbstractSampler(Sampler[int]):
    """A sampler with verl's constructor, which is how `data.sampler.class_path` is called."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns from each batch; `update` is called after every step."""

    @abstractmethod
    def update(self, batch: Any) -> None:
        """Take the results of a batch into account before the next rows are drawn."""
