"""The contract of training engines: one model that computes, learns, saves and exports its weights.

Shapes: B sequences, P prompt width, T response width, S = P + T. A batch is a `DataProto` with `input_ids` and
`attention_mask [B, S]` whose last T columns are the response, and `response_mask [B, T]` (or `responses [B, T]`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch.distributed import ProcessGroup

from hybridrl.errors import ModelError, UserError
from hybridrl.protocol import DataProto
from hybridrl.utils.metrics import Metric

LossFn = Callable[[dict[str, torch.Tensor], DataProto], tuple[torch.Tensor, Mapping[str, Any]]]
SAVE_CONTENTS = ("model", "optimizer", "extra", "hf_model")


class NonFiniteError(UserError):
    """A loss or gradient of a training step is NaN or infinite. Parameters and optimizer are unchanged.

    Attributes:
        what: `"loss"` or `"gradient"`.
        rows: For each rank the indices of its batch's sequences whose micro-batch had a non-finite loss.
        parameters: Names of parameters with a non-finite gradient (the first few).
    """

    def __init__(self, message: str, what: str, rows: Sequence[Sequence[int]], parameters: Sequence[str]):
        super().__init__(message)
        self.what = what
        self.rows = [list(part) for part in rows]
        self.parameters = list(parameters)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.what, self.rows, self.parameters)


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """How a batch is cut into micro-batches that fit the device. The results do not depend on it.

    Attributes:
        size: Maximum number of sequences per micro-batch.
        max_tokens: Maximum number of tokens per micro-batch. Padding counts, unless sequences are packed (flash
            attention). A longer sequence gets its own micro-batch. Both limits may be given; with neither, the engine
            chooses sizes that compute fast.
    """

    size: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("size", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"MicroBatching({name}={value}): a limit must be at least 1, or None for no limit")


@dataclass(frozen=True, slots=True)
class Geometry:
    """A rank's place among the ranks of an engine.

    With tensor, pipeline or sequence parallelism several ranks hold one copy of the model together. They have the same
    `dp_rank` and work on the same rows.

    Attributes:
        dp_rank: which shard of a batch this rank works on.
        dp_size: number of shards that a batch is split into.
        dp_group: one rank of each shard, in the order of the shards: those that hold the same part of the model as
            this one. None: all ranks.
        collects: whether this rank's results are collected; one rank per shard does.
    """

    dp_rank: int
    dp_size: int
    dp_group: ProcessGroup | None = None
    collects: bool = True


class Engine(ABC):
    """One model on the ranks of one process group. All ranks call every method with the same arguments."""

    @abstractmethod
    def initialize(self) -> None:
        """Build the model, load and shard its weights, make the optimizer.

        Raises:
            ModelError: the model, its weights or a setting cannot be used.
        """

    @property
    @abstractmethod
    def geometry(self) -> Geometry:
        """This rank's place among the ranks of the engine."""

    @abstractmethod
    def infer(
        self,
        batch: DataProto,
        micro: MicroBatching,
        temperature: float = 1.0,
        outputs: Collection[str] = ("log_probs",),
    ) -> dict[str, torch.Tensor]:
        """Compute without gradients.

        Args:
            temperature: The logits are divided by it, so log-probabilities are those of the distribution that was
                sampled from.
            outputs: Of a language model `log_probs` (of each response token), `entropy` and `sum_pi_squared` (of
                the distribution it was drawn from) and `ref_kl` (its divergence from the reference's, over the
                vocabulary, after `compare_with`); of a value model `values` (of the state before each response
                token).

        Returns:
            Name to float32 `[B, T]` in main memory, 0 where `response_mask` is 0. A rank that computes no outputs
            (an early stage of a pipeline) may return nothing; its loss function is not called either.
        """

    @abstractmethod
    def train_batch(
        self,
        batch: DataProto,
        micro: MicroBatching,
        loss_fn: LossFn,
        temperature: float = 1.0,
        entropy: bool = False,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        ref_kl: bool = False,
    ) -> dict[str, Metric]:
        """One optimizer step: forward and backward over micro-batches, clip, step, schedule.

        Args:
            loss_fn: `loss_fn(outputs, micro_batch) -> (loss, metrics)`. `outputs` are `log_probs` (and
                `entropy`) or `values`, `[b, t]` float32 with 0 where the mask is 0; `micro_batch` holds the
                batch's fields for the same rows and, of response-wide fields, the same first t columns (columns that
                are padding in every row are cut off, and `meta_info["response_width"]` is T). The loss is the
                micro-batch's share of the mini-batch's loss, normalised by global counts, so that shares add up over
                micro-batches and ranks. Metrics may be plain numbers: they become means weighted by the
                micro-batch's response tokens.
            ref_kl: `outputs` also has `ref_kl`, see `infer`, differentiable.
            on_nonfinite: What happens when loss or gradients are NaN or infinite: `raise` or `skip` the step.

        Returns:
            This rank's metrics (merge those of all ranks with `merge_metrics`), and the same on every rank:
            `grad_norm` (before clipping), `lr` (used in this step) and `skipped_steps` (0 or 1).

        Raises:
            NonFiniteError: on every rank, with parameters and optimizer state untouched.
        """

    def compare_with(self, reference: Engine) -> None:
        """Name the engine of the reference policy, on the same ranks, that `ref_kl` is measured against.

        Its forward pass runs on every micro-batch together with this one's, so it has to be `loaded` at the same time.

        Raises:
            ModelError: the two engines cannot read the same micro-batches, or this engine cannot compute the KL.
        """
        raise ModelError(f"{type(self).__name__} cannot compute the KL over the vocabulary; use KL form low_var_kl")

    @abstractmethod
    def loaded(self, optimizer: bool = False) -> AbstractContextManager[None]:
        """Within the context, parameters (and the optimizer's state) are on the device; offloaded again after it."""

    @abstractmethod
    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything that a checkpoint holds, one whole tensor at a time, with its Hugging Face name.

        Tied parameters are exported once. Saved buffers (such as a router's bias) are included, in their own dtype.
        All ranks iterate together.
        """

    @abstractmethod
    def weight_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of everything that `export_weights` yields."""

    @abstractmethod
    def save(self, folder: Path, contents: Sequence[str]) -> None:
        """Write `model`, `optimizer`, `extra` (schedule, random states), `hf_model` into `folder`, as requested."""

    @abstractmethod
    def load(self, folder: Path, contents: Sequence[str]) -> None:
        """Read what `save` wrote, also on another number of ranks.

        Raises:
            ModelError: the checkpoint belongs to another model, or lacks something that was requested.
        """


class TrainEngines:
    """Engines by the kind of model (`language_model`, `value_model`) and the strategy (`fsdp`, `fsdp2`)."""

    _engines: ClassVar[dict[tuple[str, str], type[Engine]]] = {}
    _builtin: ClassVar[tuple[str, ...]] = ("hybridrl.engine.fsdp.engine",)

    @classmethod
    def register(cls, model_type: str, strategy: str | Sequence[str]) -> Callable[[type[Engine]], type[Engine]]:
        """Class decorator. Its constructor takes the keyword arguments `model_type, model, engine, optim`.

        Raises:
            ValueError: another class holds the place already.
        """
        strategies = [strategy] if isinstance(strategy, str) else list(strategy)

        def add(engine: type[Engine]) -> type[Engine]:
            for name in strategies:
                holder = cls._engines.setdefault((model_type, name), engine)
                if holder is not engine:
                    raise ValueError(
                        f"an engine for {model_type} with strategy {name} is registered already: {holder.__qualname__}"
                    )
            return engine

        return add

    @classmethod
    def get(cls, model_type: str, strategy: str) -> type[Engine]:
        """The class of this kind of engine.

        Raises:
            ModelError: no such engine; the message lists those there are.
        """
        for module in cls._builtin:
            importlib.import_module(module)
        try:
            return cls._engines[(model_type, strategy)]
        except KeyError:
            known = ", ".join(f"{kind}/{name}" for kind, name in sorted(cls._engines))
            raise ModelError(f"no engine for a {model_type} with strategy={strategy!r}; there are {known}") from None

    @classmethod
    def create(cls, model_type: str, strategy: str, *, model: Any, engine: Any, optim: Any = None) -> Engine:
        """Make the engine of this kind. It holds no model until `Engine.initialize`.

        Args:
            model: A `ModelConfig`.
            engine: An `FSDPConfig`.
            optim: An `OptimConfig`, or None for an engine that only computes.

        Raises:
            ModelError: no such engine; the message lists those there are.
        """
        found: Any = cls.get(model_type, strategy)
        created: Engine = found(model_type=model_type, model=model, engine=engine, optim=optim)
        return created
