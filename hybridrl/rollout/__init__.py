"""Generation: one interface, by the training weights in place or by separate engines.

The names below are imported on first use. Processes whose main module is in this package import it first, and those of
SGLang need nothing else of it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hybridrl.errors import RolloutError

if TYPE_CHECKING:
    from hybridrl.rollout.hf.rollout import HFRollout
    from hybridrl.rollout.inference_engine import register_inference_engine
    from hybridrl.rollout.rollout import InPlaceRollout, Rollout
    from hybridrl.rollout.sampling import SamplingParams
    from hybridrl.rollout.select import resolve_rollout

_HOMES = {
    "register_inference_engine": "inference_engine",
    "HFRollout": "hf.rollout",
    "InPlaceRollout": "rollout",
    "Rollout": "rollout",
    "SamplingParams": "sampling",
    "resolve_rollout": "select",
}

__all__ = [
    "register_inference_engine",
    "HFRollout",
    "InPlaceRollout",
    "Rollout",
    "RolloutError",
    "SamplingParams",
    "resolve_rollout",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
