"""`verl.utils.model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hybridrl.data.loader import position_ids as compute_position_id_with_mask

__all__ = ["compute_position_id_with_mask", "get_model_size", "print_model_size", "update_model_config"]

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}


def get_model_size(model: nn.Module, scale: str = "auto") -> tuple[float, str]:
    """Return the number of parameters and its unit.

    Args:
        scale: `K`, `M` or `B`, an empty string for none, `auto` for the largest that gives more than 1.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    unit = scale
    if scale == "auto":
        unit = next((name for name, size in reversed(_UNITS.items()) if count > size), "")
    return count / _UNITS[unit], unit


def print_model_size(model: nn.Module, name: str | None = None) -> None:
    """Print the number of parameters on rank 0."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        count, unit = get_model_size(model)
        print(f"{name or type(model).__name__} contains {count:.2f}{unit} parameters")


def update_model_config(module_config: Any, override_config_kwargs: Mapping[str, Any]) -> None:
    """Set entries of a model's configuration, in place; a mapping changes entries of the group of that name."""
    for key, value in override_config_kwargs.items():
        if isinstance(value, Mapping):
            update_model_config(getattr(module_config, key), value)
        else:
            setattr(module_config, key, value)
