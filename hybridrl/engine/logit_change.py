"""Changes that a model makes to its logits after its output layer, if they can be computed on a tile of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

#: fields of a configuration, each with a value that leaves logits as they are
_FIELDS = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None}


class LogitChange(NamedTuple):
    """cap tanh(multiplier z / cap) of each logit z; multiplier z without a cap.

    Attributes:
        multiplier: above 0.
        soft_cap: above 0; None: none.
    """

    multiplier: float = 1.0
    soft_cap: float | None = None

    @classmethod
    def described(cls, config: PreTrainedConfig) -> LogitChange | None:
        """Return the change that a configuration describes; None if there is none that can be computed here.

        The fields are `logit_scale` (Cohere), `logits_scaling`, a divisor (Granite), and `final_logit_softcapping`
        (Gemma). The code of a model may do something else.
        """
        text = config.get_text_config()
        scale, divisor, soft_cap = (getattr(text, name, None) for name in _FIELDS)
        multiplier = (1.0 if scale is None else float(scale)) / (1.0 if divisor is None else float(divisor))
        cap = None if soft_cap is None else float(soft_cap)
        change = cls(multiplier, cap)
        return None if change == cls() or multiplier <= 0 or (cap is not None and cap <= 0) else change

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits if self.multiplier == 1.0 else logits * self.multiplier
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


@contextlib.contextmanager
def left_out(module: nn.Module) -> Iterator[None]:
    """Within the context, the model finds values in these fields that leave logits as they are."""
    config: PreTrainedConfig = module.config
    originals = []
    for holder in (module, config, config.get_text_config()):
        for name, neutral in _FIELDS.items():
            if name in vars(holder):
                originals.append((holder, name, getattr(holder, name)))
                setattr(holder, name, neutral)
    try:
        yield
    finally:
        for holder, name, value in reversed(originals):
            setattr(holder, name, value)
