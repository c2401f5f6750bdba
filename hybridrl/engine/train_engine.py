"""The contract of training engines: one model that computes, learns, saves and exports its weights.

Shapes: B sequences, P prompt width, T response width, S = P + T. A batch is a `DataProto` with `input_ids` and
`attention_mask [B, S]` whose last T columns are the response, and `response_mask [B, T]` (or `responses [B, T]`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroup

from hybridrl.engine.capabilities import CopiesState, HasAdapters, KeepsFourBits, require
from hybridrl.errors import ModelError, UserError
from hybridrl.models.info import check_files
from hybridrl.protocol import DataProto
from hybridrl.registry import TRAIN_ENGINES, import_external_lib
from hybridrl.utils.entry_metadata import TrainMetadata
from hybridrl.utils.metrics import Metric

LossFn = Callable[[dict[str, torch.Tensor], DataProto], tuple[torch.Tensor, Mapping[str, Any]]]


class NonFiniteError(UserError):
    """A loss or gradient of a training step is NaN or infinite. Parameters and optimizer are unchanged.

    Attributes:
        quantity: `"loss"` or `"gradient"`.
        rows: For each rank the indices of its batch's sequences whose micro-batch had a non-finite loss.
        parameters: Names of parameters with a non-finite gradient (the first few).
    """

    def __init__(self, message: str, quantity: str, rows: Sequence[Sequence[int]], parameters: Sequence[str]):
        super().__init__(message)
        self.quantity = quantity
        self.rows = [list(part) for part in rows]
        self.parameters = list(parameters)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.quantity, self.rows, self.parameters)


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """Limits by which a batch is cut into micro-batches that fit the device. The results do not depend on them.

    Attributes:
        size: Maximum number of sequences per micro-batch.
        max_tokens: Maximum number of tokens per micro-batch and rank; of ranks that share sequences
            (`Geometry.cp_size`), each counts. Padding counts, unless sequences are packed (flash attention).
            Tokens that are computed once for several sequences count once. A longer
            sequence gets its own micro-batch. Both limits may be given; with neither, the engine chooses sizes that
            compute fast.
        rows_together: So many rows that follow each other, from the first, are in the same micro-batch and keep their
            order: 2 for pairs that a loss compares. `size` counts rows.
        key: The setting that `max_tokens` comes from, for messages.
    """

    size: int | None = None
    max_tokens: int | None = None
    rows_together: int = 1
    key: str = ""

    def __post_init__(self) -> None:
        for name in ("size", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"MicroBatching({name}={value}): a limit must be at least 1, or None for no limit")


@dataclass(frozen=True, slots=True)
class Geometry:
    """A rank's place among the ranks of an engine.

    With tensor, context or pipeline parallelism several ranks hold one copy of the model together. They have the same
    `dp_rank` and work on the same rows. Ranks are numbered as in Megatron-core: tensor parallelism fastest, then
    context, data and pipeline parallelism.

    Attributes:
        dp_rank: which shard of a batch this rank works on.
        dp_size: number of shards that a batch is split into.
        dp_group: one rank of each shard, in the order of the shards: those that hold the same part of the model as
            this one. None: all ranks.
        tp_rank, tp_size: which part of each tensor this rank holds, and how many parts there are.
        cp_rank, cp_size: which part of each sequence it works on, and how many parts there are.
        pp_rank, pp_size: its pipeline stage, and how many stages there are. The last stage computes the outputs.
    """

    dp_rank: int
    dp_size: int
    dp_group: ProcessGroup | None = None
    _: KW_ONLY
    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def collects(self) -> bool:
        """Whether this rank's results are collected; one rank per shard does."""
        return self.tp_rank == self.cp_rank == 0 and self.pp_rank == self.pp_size - 1


class Engine(ABC):
    """One model on the ranks of one process group. All ranks call every method with the same arguments."""

    @classmethod  # noqa: B027
    def check(cls, model: Any, engine: Any, ranks: int, optim: Any = None) -> None:
        """Refuse what `initialize` would refuse, as far as that can be known before a model is loaded.

        It runs in the process of the program, which may have other devices than the ranks.

        Args:
            model: a `ModelConfig`.
            engine: the settings that this engine reads.
            ranks: number of ranks that the engine will have.
            optim: an `OptimConfig`; None for an engine that only computes.

        Raises:
            ModelError: a setting or the model cannot be used; the message names the key and the values that fit.
        """

    @classmethod
    def check_optimizer(cls, optim: Any) -> None:
        """Refuse an optimizer, or arguments of one, that this engine cannot build.

        Args:
            optim: an `OptimConfig`.

        Raises:
            ModelError: the message names the setting.
        """
        from hybridrl.engine.optim.optimizer import check_optimizer

        check_optimizer(optim)

    @classmethod
    def check_first_weights(cls, model: Any, engine: Any) -> None:
        """Refuse weights that are missing, incomplete or of another model, where this engine looks for them.

        That is `model.path`; a model of the hub is checked where it is loaded.

        Args:
            model: a `ModelConfig`.
            engine: the settings that this engine reads.

        Raises:
            ModelError: there are no weights, or not those that the model's configuration describes.
        """
        check_files(model)

    @classmethod
    def check_async_save(cls, key: str) -> None:
        """Refuse to save while training goes on, unless this engine has the capability `CopiesState`.

        Args:
            key: the setting that asks for it, with its value.

        Raises:
            ModelError: it lacks the capability.
        """
        require(cls, CopiesState, key, "set it to False")

    @classmethod
    def check_adapter(cls, key: str) -> None:
        """Refuse to train an adapter, unless this engine has the capability `HasAdapters`.

        Args:
            key: the settings that ask for it.

        Raises:
            ModelError: it lacks the capability.
        """
        require(cls, HasAdapters, key, "set the strategy to fsdp2, or train all weights")

    @classmethod
    def check_four_bit(cls, key: str) -> None:
        """Refuse a model in 4 bits, unless this engine has the capability `KeepsFourBits`.

        Args:
            key: the settings that ask for it.

        Raises:
            ModelError: it lacks the capability.
        """
        require(cls, KeepsFourBits, key, "set the strategy to fsdp2, or load_in_4bit to False")

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
                vocabulary, after `ComparesVocabulary.compare_with`); of a value model `values` (of the state before
                each response token). With `ReplaysRouting` also `routed_experts`.

        Returns:
            Name to float32 `[B, T]` in main memory, 0 where `response_mask` is 0; `routed_experts` are integers
            `[B, S, L, K]` for L layers and K experts per token, 0 on padding and in rows without response tokens. A
            rank that computes no outputs (an early stage of a pipeline) may return nothing; its loss function is not
            called either.
        """

    def pop_pass_metrics(self) -> dict[str, Metric]:
        """This rank's metrics of the `infer` calls since the last call of this method."""
        return {}

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

    @abstractmethod
    def loaded(self, optimizer: bool = False) -> AbstractContextManager[None]:
        """Within the context, parameters are on the device; offloaded ones return to main memory afterwards.

        Args:
            optimizer: the weights will be updated, so the optimizer's state and master weights are needed, too.
        """

    @abstractmethod
    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything that a checkpoint holds, one whole tensor at a time, with its Hugging Face name.

        Tied parameters are exported once. Saved buffers (such as a router's bias) are included, in their own dtype.
        All ranks iterate together.
        """

    @abstractmethod
    def weight_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of everything that `export_weights` yields."""

    def first_step_bytes(self) -> int:
        """Bytes on the device that the first optimizer step takes and that stay taken between uses.

        An inference engine that shares the device must not count them as free when it starts.
        """
        return 0

    @abstractmethod
    def save(self, folder: Path, contents: Sequence[str]) -> None:
        """Write `model`, `optimizer`, `extra` (schedule, random states), `hf_model` into `folder`, as requested.

        It is called outside of `loaded`, when generation may be using the device: offloaded state stays where it is.
        """

    @abstractmethod
    def load(self, folder: Path, contents: Sequence[str]) -> None:
        """Read what `save` wrote, also on another number of ranks, and like `save` outside of `loaded`.

        Raises:
            ModelError: the checkpoint belongs to another model, or lacks something that was requested.
        """


def register_train_engine(
    name: str,
    *,
    model_types: Sequence[str] = ("language_model", "value_model"),
    settings: type | str | None = None,
    layout: type | str | None = None,
) -> Callable[[type[Engine]], type[Engine]]:
    """Class decorator that adds a training engine; `module:Class` names one that is not registered.

    Its constructor takes the keyword arguments `model_type, model, engine, optim`.

    Args:
        name: value of `strategy`.
        model_types: the kinds of model that it can train.
        settings: dataclass of its own settings, or where that is. They are further keys of `fsdp_config`
            (`critic.fsdp`, `engine`), or of `megatron` if the class derives from `MegatronConfig`, and the
            engine finds them as attributes of its argument `engine`.
        layout: class of the layouts in which it holds a model (`ExportsShards.training_layout`), or where that is,
            for `python -m hybridrl.hybrid_engine.print_plan`.

    Raises:
        ModelError: another class has the name already.
    """

    def add(engine: type[Engine]) -> type[Engine]:
        TRAIN_ENGINES.add(name, engine, TrainMetadata(model_types=tuple(model_types), settings=settings, layout=layout))
        return engine

    return add


def train_engine_class(model_type: str, strategy: str) -> type[Engine]:
    """The class of this kind of engine.

    Raises:
        ModelError: no such engine, or not for this kind of model; the message lists those there are.
    """
    engine_class = TRAIN_ENGINES.get(strategy)
    kinds = TRAIN_ENGINES.metadata(strategy).model_types
    if model_type not in kinds:
        raise ModelError(f"no engine for a {model_type} with strategy={strategy!r}; it trains {', '.join(kinds)}")
    if not (isinstance(engine_class, type) and issubclass(engine_class, Engine)):
        raise ModelError(f"{TRAIN_ENGINES.key}={strategy}: {engine_class!r} is not derived from hybridrl.engine.Engine")
    return engine_class


def create_train_engine(model_type: str, strategy: str, *, model: Any, engine: Any, optim: Any = None) -> Engine:
    """Make the engine of this kind. It holds no model until `Engine.initialize`.

    Args:
        model: A `ModelConfig`; the modules that its `external_lib` names are imported first.
        engine: The settings that this engine reads; see `hybridrl.config.entry_settings.engine_settings`.
        optim: An `OptimConfig`, or None for an engine that only computes.

    Raises:
        ModelError: no such engine, or not for this kind of model; the message lists those there are.
    """
    import_external_lib(getattr(model, "external_lib", None))
    engine_class: Any = train_engine_class(model_type, strategy)
    created: Engine = engine_class(model_type=model_type, model=model, engine=engine, optim=optim)
    return created
