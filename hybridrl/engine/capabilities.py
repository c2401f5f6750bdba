"""What some training engines can do and others cannot. Whoever needs it asks at start-up, by `require`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from hybridrl.errors import ModelError


class GeneratesInPlace(ABC):
    """The model can generate inside the training process, with the weights that it trains."""

    @abstractmethod
    def whole_weights(self) -> AbstractContextManager[nn.Module]:
        """The module with every parameter whole on this rank and in the dtype of training's forward pass.

        Its forward needs no other rank within the context, so ranks may call it different numbers of times.
        """


class HasAdapters(ABC):
    """The model trains an adapter (LoRA) next to frozen weights."""

    @abstractmethod
    def without_adapter(self) -> AbstractContextManager[None]:
        """Within the context, the model computes as it did before training: it is its own reference policy."""

    @abstractmethod
    def export_adapter(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The adapter's tensors, whole, by the names of PEFT's files. All ranks iterate together."""


@dataclass(frozen=True, slots=True)
class WeightShard:
    """The part of a parameter that one rank holds.

    Attributes:
        name: the parameter's Hugging Face name.
        shape: of the whole parameter.
        offsets: where the part begins, per dimension.
        tensor: the part.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor


class ExportsShards(ABC):
    """The engine can export its weights without gathering whole tensors."""

    @abstractmethod
    def export_shards(self, dtype: torch.dtype | None = None) -> Iterator[WeightShard]:
        """This rank's part of every parameter. Ranks need not iterate together."""


def require(engine: type | object, capability: type, key: str, instead: str) -> None:
    """Refuse an engine that lacks a capability.

    Args:
        engine: a training engine, or its class before there is an instance.
        capability: a class of this module.
        key: the setting that asks for it, with its value.
        instead: what to change.

    Raises:
        ModelError: the engine lacks it.
    """
    cls = engine if isinstance(engine, type) else type(engine)
    if not issubclass(cls, capability):
        raise ModelError(
            f"{key} needs a training engine with the capability {capability.__name__} "
            f"({(capability.__doc__ or '').strip().splitlines()[0]}), and {cls.__name__} does not have it; {instead}"
        )
