"""The kinds of model that training engines build: language, value and reward models, and classifiers of steps.

Code asks for the metadata of a kind, never for its name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybridrl.models import loading, stored, value


@dataclass(frozen=True)
class ModelKind:
    """One kind of model: its constructors and its outputs.

    Attributes:
        outputs: the values per token that an engine computes with it.
        build: builds it without weights, from configuration, dtype and `trust_remote_code`.
        load: builds it with the weights of a path, which is the first argument.
        open: opens its weights without reading them; the path is the first argument.
        predicts_tokens: whether its output layer gives the logits of a vocabulary; else it is a head with scores.
        has_bias: whether that head is saved with a bias.
    """

    outputs: tuple[str, ...]

    build: Callable[..., Any]
    load: Callable[..., Any]
    open: Callable[..., stored.StoredWeights]
    predicts_tokens: bool = False
    has_bias: bool = False


_VALUES = ("values",)
KINDS = {
    "language_model": ModelKind(
        ("log_probs", "entropy", "sum_pi_squared", "ref_kl"),
        loading.build_language_model,
        loading.load_language_model,
        stored.open_language_model,
        predicts_tokens=True,
    ),
    "value_model": ModelKind(
        _VALUES, value.build_value_model, value.load_value_model, value.open_value_model, has_bias=True
    ),
    "reward_model": ModelKind(
        _VALUES,
        partial(value.build_value_model, bias=False),
        partial(value.load_value_model, bias=False),
        partial(value.open_value_model, bias=False),
    ),
    "step_model": ModelKind(
        _VALUES,
        value.build_value_model,
        partial(value.load_value_model, steps=True),
        partial(value.open_value_model, steps=True),
    ),
}
