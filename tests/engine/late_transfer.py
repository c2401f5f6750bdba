"""Copies that are as late as they may be, which shows what does not wait for them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hybridrl.utils import device


class LateTransfer(device.Transfer):
    """Copies when it is awaited. Until then its targets hold NaN, or the largest integer."""

    def __init__(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__(())
        self._late = list(copies)
        for target, _ in self._late:
            target.fill_(float("nan") if target.is_floating_point() else torch.iinfo(target.dtype).max)

    def wait(self) -> None:
        for target, source in self._late:
            target.copy_(source)
        self._late = []

    def order(self) -> None:
        self.wait()
