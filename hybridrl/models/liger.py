"""Liger's kernels in the layers of a model (`model.use_liger`): norms, gated MLPs and rotary embeddings, fused.

A layer's cheap operations are one kernel each instead of five to ten, and keep less for the backward pass. The output
layer is not replaced: `hybridrl.algorithms` computes what training needs of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hybridrl.errors import ModelError
from hybridrl.notify import notify
from hybridrl.utils import device, distributed

PACKAGE = "liger_kernel"
#: parts of an output layer with a loss, which training here does not use
_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
_OFF = "or set model.use_liger=False"


def check_liger(config: PreTrainedConfig) -> None:
    """Refuse `model.use_liger` for a model that Liger has no kernels for, where the package can be asked.

    Raises:
        ModelError: it names the model's family and those that Liger knows.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        return  # a controller without GPU need not have it; `runs_liger` refuses on a worker
    functions = _functions()
    if config.model_type not in functions:
        raise ModelError(
            f"model.use_liger=True: Liger has no kernels for models of the family {config.model_type}, only for "
            f"{', '.join(sorted(functions))}; choose one of these, {_OFF}"
        )


def runs_liger() -> bool:
    """Whether Liger's kernels can run in this process; notify if the device cannot run them (results are the same).

    Raises:
        ModelError: the device could run them, and the package is missing.
    """
    if not device.runs_triton():
        if distributed.get_rank() == 0:
            notify(f"model.use_liger has no effect on {device.current_name()}, which does not run Triton's kernels")
        return False
    if importlib.util.find_spec(PACKAGE) is None:
        raise ModelError(
            "model.use_liger=True needs the package liger-kernel; install it (bash scripts/install.sh cuda liger), "
            f"{_OFF}"
        )
    return True


def apply_liger(module: nn.Module, config: PreTrainedConfig) -> None:
    """Give the layers of this model Liger's kernels.

    The rotary embedding is a function of transformers' module, so that of other models of the family in this process
    is replaced, too; their layers are not.

    Raises:
        ModelError: Liger does not know the model.
    """
    check_liger(config)
    apply = _functions()[config.model_type]
    takes = inspect.signature(apply).parameters
    # A value model is a class of this library around one of transformers, so the classes of all parts count.
    modelings = {type(part).__module__ for part in module.modules()}
    before = [(sys.modules[name], dict(vars(sys.modules[name]))) for name in modelings]
    apply(model=module, **{name: False for name in _LOSSES if name in takes})
    for modeling, values in before:
        for name, value in values.items():
            if inspect.isclass(value):  # models that are built later, and did not ask for it, are transformers' own
                setattr(modeling, name, value)


def _functions() -> dict[str, Any]:
    """Liger's function for each family of models."""
    functions: dict[str, Any] = importlib.import_module(
        f"{PACKAGE}.transformers.monkey_patch"
    ).MODEL_TYPE_TO_APPLY_LIGER_FN
    return functions
