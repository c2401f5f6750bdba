"""Batches of datums: what a loss needs is checked, and rows are laid out for the workers.

Shapes: B datums of N <= T tokens, T = S - 1, K targets of a position, I inputs of a loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hybridrl.protocol import DataProto
from hybridrl.registry import DATUM_LOSSES
from hybridrl.tinker.wire import Array, Datum, RequestError

TARGETS = "target_tokens"


def loss_numbers(name: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """Return the numbers of a loss, with its defaults.

    Raises:
        RequestError: the loss is unknown, or one of its numbers, or one is missing.
    """
    if ":" in name or not DATUM_LOSSES.knows(name):
        raise RequestError(f"loss_fn={name!r} is not served; choose from {', '.join(DATUM_LOSSES.names())}")
    defaults = DATUM_LOSSES.metadata(name).config
    if unknown := sorted(config.keys() - defaults.keys()):
        listed = ", ".join(defaults) or "none"
        raise RequestError(f"loss_fn_config[{unknown[0]}]: {name} has no such number; allowed: {listed}")
    numbers = {}
    for key, default in defaults.items():
        value = config.get(key, default)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RequestError(f"loss_fn_config[{key}]={value!r}: {name} needs a finite number")
        numbers[key] = float(value)
    return numbers


def check_datums(datums: Sequence[Datum], loss: str, vocabulary: int, longest: int) -> None:
    """Refuse datums that the loss or the model cannot read.

    Args:
        loss: a registered name.
        vocabulary: token ids are below.
        longest: number of tokens.

    Raises:
        RequestError: the message names the datum, the field and what is allowed.
    """
    metadata = DATUM_LOSSES.metadata(loss)
    if not datums:
        raise RequestError("data has no datum")
    for number, datum in enumerate(datums):
        where = f"data[{number}]"
        count = len(datum.tokens)
        if not 1 <= count <= longest:
            raise RequestError(f"{where}.model_input has {count} tokens; from 1 to {longest} are served")
        expected = {TARGETS, *metadata.inputs}
        if datum.inputs.keys() != expected:
            raise RequestError(
                f"{where}.loss_fn_inputs has {', '.join(sorted(datum.inputs)) or 'nothing'}; {loss} reads "
                f"{', '.join(sorted(expected))}"
            )
        targets = datum.inputs[TARGETS]
        if len(targets) != count or targets.ndim > 1 + metadata.several_targets or targets.size == 0:
            several = " or [N, K]" if metadata.several_targets else ""
            raise RequestError(
                f"{where}.loss_fn_inputs[{TARGETS}] has shape {list(targets.shape)}; {loss} needs [N]{several}, "
                f"N={count}"
            )
        for name, ids in (("model_input", datum.tokens), (f"loss_fn_inputs[{TARGETS}]", targets)):
            if ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= vocabulary:
                raise RequestError(f"{where}.{name}: token ids are integers from 0 to {vocabulary - 1}")
        for name in metadata.inputs:
            values = datum.inputs[name]
            if values.shape != targets.shape or not np.isfinite(values).all():
                raise RequestError(
                    f"{where}.loss_fn_inputs[{name}] has shape {list(values.shape)}; finite numbers of the shape of "
                    f"{TARGETS}, {list(targets.shape)}, are needed"
                )


def batch_of_datums(datums: Sequence[Datum], inputs: Sequence[str]) -> DataProto:
    """Lay datums out: position i of a row predicts the targets of position i.

    Args:
        inputs: names of the I inputs.

    Returns:
        `input_ids`, `attention_mask` `[B, S]`, `response_mask` `[B, T]`, `datum_targets` `[B, T, K]`, `datum_inputs`
        `[B, T, K, I]`. A row is its tokens and one more, which nothing reads: the last position predicts it.
    """
    rows, width = len(datums), max(len(datum.tokens) for datum in datums)
    several = max(datum.inputs[TARGETS].shape[1] if datum.inputs[TARGETS].ndim == 2 else 1 for datum in datums)
    ids = np.zeros((rows, width + 1), dtype=np.int64)
    attention, mask = np.zeros((rows, width + 1), dtype=np.int64), np.zeros((rows, width), dtype=np.int64)
    targets = np.zeros((rows, width, several), dtype=np.int64)
    values = np.zeros((rows, width, several, len(inputs)), dtype=np.float32)
    for row, datum in enumerate(datums):
        count = len(datum.tokens)
        own = datum.inputs[TARGETS].reshape(count, -1)
        ids[row, :count], attention[row, : count + 1], mask[row, :count] = datum.tokens, 1, 1
        targets[row, :count, : own.shape[1]] = own
        for place, name in enumerate(inputs):
            values[row, :count, : own.shape[1], place] = datum.inputs[name].reshape(own.shape)
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(attention),
            "response_mask": torch.from_numpy(mask),
            "datum_targets": torch.from_numpy(targets),
            "datum_inputs": torch.from_numpy(values),
        }
    )


def log_probs_of(datums: Sequence[Datum], log_probs: torch.Tensor) -> list[Array]:
    """Cut `[B, T, K]` to the shape of each datum's targets."""
    cut = []
    for row, datum in enumerate(datums):
        shape = datum.inputs[TARGETS].shape
        several = shape[1] if len(shape) == 2 else 1
        cut.append(log_probs[row, : shape[0], :several].numpy().reshape(shape))
    return cut


def as_datum(tokens: Sequence[int]) -> Datum:
    """Return a prompt as a datum whose targets are its own next tokens."""
    ids = np.asarray(tokens, dtype=np.int64)
    return Datum(ids[:-1], {TARGETS: ids[1:]})
