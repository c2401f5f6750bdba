"""Weights of a conversation's turns in supervised training, in the spellings of several libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

#: fields of a message that say whether its turn is learnt: true, false, 1 or 0
FLAGS = ("train", "trainable", "training", "learn", "loss", "loss_mask", "step_loss_mask")
#: fields of a message that say how much its turn counts
WEIGHTS = ("weight", "loss_weight", "loss_scale")
TURN_FIELDS = (*WEIGHTS, *FLAGS)

#: columns of a row that say for other libraries what is learnt, and for nothing else
MASK_COLUMNS = (
    *("loss_mask", "loss_masks", "step_loss_mask", "train_mask", "trainable", "completion_mask", "response_mask"),
    *("assistant_mask", "assistant_masks", "loss_weight", "loss_weights", "sample_weight"),
)
#: columns that may say so, beside those whose names have `mask` or `weight` in them
_POSSIBLE_MASK_COLUMNS = ("train", "loss", "loss_scale", "labels")


def may_be_mask(column: str) -> bool:
    """Whether a column may say what is learnt, by its name."""
    return column in _POSSIBLE_MASK_COLUMNS or any(word in column.lower() for word in ("mask", "weight"))


def turn_weight(message: Mapping[str, Any]) -> float | None:
    """Return the factor of the loss of a message's tokens, or None where no field has one.

    Raises:
        ValueError: a field holds something else than a flag or weight; the text is a clause about the message.
    """
    fields = {name: message[name] for name in TURN_FIELDS if message.get(name) is not None}
    if not fields:
        return None
    if len(fields) > 1:
        first, second = sorted(fields)[:2]
        raise ValueError(f"has both {first!r} and {second!r}; give one of them")
    ((name, value),) = fields.items()
    if name in FLAGS:
        if not isinstance(value, bool | np.bool_ | int | float) or value not in (0, 1):
            raise ValueError(f"has {name}={value!r}; it must be true or false")
        weight = float(value)
    else:
        if not isinstance(value, int | float) or isinstance(value, bool) or not np.isfinite(value) or value < 0:
            raise ValueError(f"has {name}={value!r}; it must be a number that is not negative")
        weight = float(value)
    if message.get("role") != "assistant" and weight:
        raise ValueError(f"is to be trained on ({name}); only turns of the assistant are")
    return weight
