"""The kinds of model that training engines build: language, value and reward models, and classifiers of steps."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybridrl.models import loading, stored, value


@dataclass(frozen=True)
class ModelKind:
    """The constructors of one kind of model.

    Attributes:
        build: builds it without weights, from configuration, dtype and `trust_remote_code`.
        load: builds it with the weights of a path, which is the first argument.
        open: opens its weights without reading them; the path is the first argument.
    """

    build: Callable[..., Any]
    load: Callable[..., Any]
    open: Callable[..., stored.StoredWeights]


KINDS = {
    "language_model": ModelKind(loading.build_language_model, loading.load_language_model, stored.open_language_model),
    "value_model": ModelKind(value.build_value_model, value.load_value_model, value.open_value_model),
    "reward_model": ModelKind(
        partial(value.build_value_model, bias=False),
        partial(value.load_value_model, bias=False),
        partial(value.open_value_model, bias=False),
    ),
    "step_model": ModelKind(
        value.build_value_model,
        partial(value.load_value_model, steps=True),
        partial(value.open_value_model, steps=True),
    ),
}
