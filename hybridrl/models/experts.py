"""The routed experts of a mixture-of-experts model, where transformers stores those of a layer in fused parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from hybridrl.models.lora import has_fused_experts
from hybridrl.models.routers import router_layers

#: parameters of a layer's experts, the first dimension of each counts the experts
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
BIASES = tuple(f"{name}_bias" for name in WEIGHTS)


def fused_experts(module: nn.Module) -> list[Any]:
    """Return the modules that hold the experts of a layer and compute them by the experts interface of transformers."""
    return [part for part in module.modules() if _by_interface(part)]


def _by_interface(part: nn.Module) -> bool:
    declared = all(hasattr(part, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts", "config"))
    return declared and hasattr(type(part).forward, "__wrapped__") and hasattr(part, "down_proj")


def unfused_reason(module: nn.Module) -> str | None:
    """Return why the experts of a model cannot be divided among ranks; None if they can.

    Args:
        module: the model, with or without weights.
    """
    experts = fused_experts(module)
    if not experts and (has_fused_experts(module) or router_layers(module)):
        return (
            f"{type(module).__name__} does not compute its experts by transformers' interface for fused parameters "
            "(use_experts_implementation)"
        )
    if not experts:
        return f"{type(module).__name__} has no routed experts"
    for part in experts:
        for name, parameter in part.named_parameters():
            if name not in (*WEIGHTS, *BIASES) or parameter.shape[0] != part.num_experts:
                return f"{type(part).__name__} has a parameter {name} {list(parameter.shape)}, which no expert owns"
    return None
