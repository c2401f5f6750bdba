"""Whether an engine can compute what another one, or the rows of its batch, take part in."""

from __future__ import annotations

from hybridrl.engine.logits_functions import LogitsFunction
from hybridrl.engine.micro_batched import MicroBatchedEngine
from hybridrl.engine.train_engine import Engine
from hybridrl.errors import ModelError


def check_function(engine: MicroBatchedEngine, function: LogitsFunction) -> None:
    """Refuse a function of logits that this engine cannot provide with what it reads.

    Raises:
        ModelError: it reads fields of rows, and tokens that rows share are computed once; or see `check_same_batches`.
    """
    if function.fields and engine.shares_prefixes is True:
        raise ModelError(
            f"{', '.join(function.fields)} belong to single rows, and model.share_prefixes=True computes tokens once "
            "that rows share; set it to False"
        )
    if function.other is not None:
        check_same_batches(engine, function.other, "a loss over the vocabulary", "distillation.fsdp_config")


def check_same_batches(engine: MicroBatchedEngine, other: Engine, function: str, where: str) -> None:
    """Refuse an engine that cannot read the micro-batches of another one.

    Args:
        engine: whose micro-batches they are.
        function: the setting whose function compares the two models, for messages.
        where: the settings of the other one.

    Raises:
        ModelError: they have other strategies, another attention, or other ranks per sequence.
    """
    # Where sharing is left to the engine, it computes trees only if both can.
    alike = isinstance(other, type(engine)) and (other.packed, other.shares_prefixes is True) == (
        engine.packed,
        engine.shares_prefixes is True,
    )
    if not alike:
        raise ModelError(
            f"{function} compares both models on the same micro-batches, so both need the same strategy and attention: "
            f"give {where} the dtype of actor_rollout_ref.actor.fsdp_config"
        )
    if other.geometry.cp_size != engine.geometry.cp_size:
        raise ModelError(
            f"{function} compares both models token by token, so both need the same ulysses_sequence_parallel_size: "
            f"{where} has {other.geometry.cp_size} and actor_rollout_ref.actor.fsdp_config {engine.geometry.cp_size}"
        )
