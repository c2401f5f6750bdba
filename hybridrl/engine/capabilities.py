"""Optional capabilities of training engines. A caller that needs one checks for it at start-up with `require`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hybridrl.errors import ModelError
from hybridrl.layouts.topology import Layout

if TYPE_CHECKING:
    from hybridrl.engine.logits_functions import LogitsFunction
    from hybridrl.engine.saved_parts import State


class GeneratesInPlace(ABC):
    """The model can generate inside the training process, with the weights that it trains."""

    @abstractmethod
    def whole_weights(self) -> AbstractContextManager[nn.Module]:
        """The module with every parameter whole on this rank and in the dtype of training's forward pass.

        Its forward needs no other rank within the context, so ranks may call it different numbers of times.
        """


class ComparesVocabulary(ABC):
    """The engine can compute the KL to a reference policy over the whole vocabulary."""

    @abstractmethod
    def compare_with(self, reference: Any) -> None:
        """Name the engine of the reference policy, on the same ranks, that `ref_kl` is measured against.

        Its forward pass runs on every micro-batch together with this one's, so it has to be `loaded` at the same time.

        Raises:
            ModelError: the two engines cannot read the same micro-batches.
        """


class ComputesFromLogits(ABC):
    """The engine can compute outputs of the caller's own from the logits of response tokens."""

    @abstractmethod
    def computing(self, function: LogitsFunction) -> AbstractContextManager[None]:
        """Within the context, `infer` computes the function's outputs where it is asked for them by name.

        `train_batch` computes them always, and hands them to the loss function.

        Raises:
            ModelError: the function reads fields of rows, and the engine computes tokens once that rows share; or it
                compares with an engine that cannot read the same micro-batches.
        """


class ReplaysRouting(ABC):
    """The experts that tokens chose can be an output of `infer` (`routed_experts`).

    A batch with this field is computed, by `infer` and by `train_batch`, with the experts in it; their weights are
    those of the current routers.
    """

    @classmethod
    @abstractmethod
    def check_replay(cls, model: Any, engine: Any) -> None:
        """Refuse a model without routers, and settings that replay cannot be combined with.

        Args:
            model: a `ModelConfig`.
            engine: the settings that the engine reads.

        Raises:
            ModelError: the model or a setting prevents replay; the message names it.
        """

    @abstractmethod
    def recorded_routing(self) -> AbstractContextManager[list[torch.Tensor]]:
        """Within the context, every forward pass of the module adds the experts of its tokens to the list.

        They are integers `[T, K]` for each layer with experts, in the order of the layers; T are the tokens of the
        pass, row after row, padding included, and K the experts of each token.
        """


class HasAdapters(ABC):
    """The model trains an adapter (LoRA) next to frozen weights."""

    @abstractmethod
    def without_adapter(self) -> AbstractContextManager[None]:
        """Within the context, the model computes as it did before training: it is its own reference policy."""

    @abstractmethod
    def export_adapter(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The adapter's tensors, whole, by the names of PEFT's files. All ranks iterate together."""

    @abstractmethod
    def adapter_config(self) -> str:
        """The content of PEFT's `adapter_config.json`."""


class KeepsFourBits(ABC):  # noqa: B024 (it says that a setting acts)
    """Capability to keep frozen layers in 4 bits (`model.load_in_4bit`)."""


@dataclass(frozen=True, slots=True)
class WeightShard:
    """The part of a parameter that one rank holds.

    Attributes:
        name: the parameter's Hugging Face name.
        shape: of the whole parameter.
        offsets: where the part begins, per dimension.
        tensor: the part.
        keeps_dtype: it is sent in its own dtype, whatever the others are sent in (a saved buffer).
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    keeps_dtype: bool = False


class ExportsShards(ABC):
    """The engine can export its weights without gathering whole tensors."""

    @abstractmethod
    def export_shards(self, dtype: torch.dtype | None = None) -> Iterator[WeightShard]:
        """Yield this rank's part of each tensor of a checkpoint. Ranks need not iterate together.

        Several shards may be parts of one tensor; they do not overlap. A rank that has no part of a tensor leaves it
        out. Tied parameters are exported once.

        Args:
            dtype: in which they will be sent. The shards are views of what is in memory, in the dtype that it has there
                (of several copies, the one of this dtype), so that all of them can be held at the same time. Whoever
                sends them converts.
        """

    @property
    def copy_of_model(self) -> int:
        """Number of the model copy that this rank's shards belong to, if several groups of ranks train whole copies."""
        return 0

    @property
    def training_layout(self) -> Layout | None:
        """Return the layout of the model on all ranks; None: inference engines are placed rank after rank.

        With a layout, inference engines are placed next to the ranks whose shards they need.
        """
        return None


class CopiesState(ABC):
    """The engine can copy its state to main memory, from where it is written while training goes on."""

    @abstractmethod
    def copy_state(self, contents: Sequence[str]) -> State:
        """Copy what `Engine.save` would write. All ranks call it together, outside of `loaded`.

        What is returned uses neither the engine nor the device nor other ranks, so any thread may write it.
        """


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
