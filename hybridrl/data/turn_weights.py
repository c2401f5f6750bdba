"""Weights of a conversation's turns in supervised training, in the spellings of several libraries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np

#: fields of a message that say whether its turn is learnt: true, false, 1 or 0
FLAGS = ("train", "trainable", "training", "learn", "loss", "loss_mask", "step_loss_mask")
#: fields of a message that say how much its turn counts
WEIGHTS = ("weight", "loss_weight", "loss_scale")
#: fields that say the opposite: true or 1 is not learnt
_MASKED = ("masked", "is_masked")
TURN_FIELDS = (*WEIGHTS, *FLAGS, *_MASKED)

#: words of names of fields that may say whether a turn, or which part of it, is learnt
_WORDS = {"mask", "masked", "masks", "loss", "train", "trained", "training", "learn", "learned", "learnt", "learnable"}
_WORDS |= {"weight", "weights", "supervise", "supervised"}
_DETAILS = ("train_detail", "training_detail")  # of axolotl: parts of a turn

#: columns of a row that say for other libraries what is learnt, and for nothing else
MASK_COLUMNS = (
    *("loss_mask", "loss_masks", "step_loss_mask", "train_mask", "trainable", "completion_mask", "response_mask"),
    *("assistant_mask", "assistant_masks", "loss_weight", "loss_weights", "sample_weight"),
)
#: columns that say so if their values have the form of a weight, of a flag, or of what stands for each turn or token
_WEIGHT_COLUMNS = (*WEIGHTS, "weights")
_LIST_COLUMNS = (*_WEIGHT_COLUMNS, *FLAGS, "labels")


def may_be_mask(column: str) -> bool:
    """Whether a column may say what is learnt, by its name."""
    return column in _LIST_COLUMNS or any(word in column.lower() for word in ("mask", "weight"))


def is_mask(column: str, values: Iterable[Any]) -> bool:
    """Whether a column says what is learnt, by its name and the form of its values; None says nothing."""
    some = (value for value in values if value is not None)
    if column in MASK_COLUMNS:
        return next(some, None) is not None
    return any(_has_form(column, value) for value in some)


def _has_form(column: str, value: Any) -> bool:
    if isinstance(value, (list, tuple, np.ndarray)):
        return column in _LIST_COLUMNS and len(value) > 0 and all(isinstance(item, Real | np.bool_) for item in value)
    if isinstance(value, bool | np.bool_):
        return column in FLAGS
    return column in _WEIGHT_COLUMNS and isinstance(value, Real)


def _may_be_flag(name: str, value: Any) -> bool:
    """Whether a field of a message may say what is learnt, by a word of its name and the form of its value."""
    if name in _DETAILS:
        return value is not None and len(value) > 0
    if not set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")) & _WORDS:
        return False
    if isinstance(value, (list, tuple, np.ndarray)):
        return len(value) > 0 and all(isinstance(item, Real | np.bool_) for item in value)
    return isinstance(value, bool | np.bool_) or (isinstance(value, Real) and value in (0, 1))


def turn_weight(message: Mapping[str, Any]) -> float | None:
    """Return the factor of the loss of a message's tokens, or None where no field has one.

    Raises:
        ValueError: a field holds something else than a flag or weight; the text is a clause about the message.
    """
    fields = {name: message[name] for name in TURN_FIELDS if message.get(name) is not None}
    if unknown := next((name for name in message if name not in TURN_FIELDS and _may_be_flag(name, message[name])), ""):
        raise ValueError(
            f"has {unknown}={str(message[unknown])[:40]}, which is not read and looks like a mask or weight of what is "
            "learnt; write train or weight instead, or remove the field"
        )
    if not fields:
        return None
    if len(fields) > 1:
        first, second = sorted(fields)[:2]
        raise ValueError(f"has both {first!r} and {second!r}; give one of them")
    ((name, value),) = fields.items()
    if name in FLAGS or name in _MASKED:
        if not isinstance(value, bool | np.bool_ | int | float) or value not in (0, 1):
            raise ValueError(f"has {name}={value!r}; it must be true or false")
        weight = float(value) if name in FLAGS else 1.0 - float(value)
    else:
        if not isinstance(value, int | float) or isinstance(value, bool) or not np.isfinite(value) or value < 0:
            raise ValueError(f"has {name}={value!r}; it must be a number that is not negative")
        weight = float(value)
    if message.get("role") != "assistant" and weight:
        if name in _MASKED:
            return 0.0
        raise ValueError(f"is to be trained on ({name}); only turns of the assistant are")
    return weight
