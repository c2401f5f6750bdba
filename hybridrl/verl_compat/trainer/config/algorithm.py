"""`verl.trainer.config.algorithm`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from hybridrl.algorithms import PRESETS, rollout_correction_preset
from hybridrl.config import AlgorithmConfig as AlgoConfig
from hybridrl.config import FilterGroupsConfig, KLControlConfig, PFPPOConfig
from hybridrl.config import RolloutCorrectionConfig as _RolloutCorrectionConfig

__all__ = ["AlgoConfig", "FilterGroupsConfig", "KLControlConfig", "PFPPOConfig", "RolloutCorrectionConfig"]

#: verl's name of an argument -> the setting
_SETTINGS = {
    "threshold": "rollout_is_threshold",
    "is_threshold": "rollout_is_threshold",
    "rs_threshold": "rollout_rs_threshold",
}


class RolloutCorrectionConfig(_RolloutCorrectionConfig):
    """The settings with verl's factories, `RolloutCorrectionConfig.decoupled_token_is(threshold=2.0)` and so on."""


def _parameters(preset: dict[str, Any]) -> list[inspect.Parameter]:
    """Return the parameters that verl's factory of a preset has, with their defaults."""
    defaults: dict[str, Any] = {}
    band = str(preset.get("rollout_is_threshold", "")).split("_")
    if len(band) == 2:
        defaults = {"threshold": float(band[1]), "threshold_lower": float(band[0])}
    elif "rollout_is" in preset:
        defaults["is_threshold" if "rollout_rs" in preset else "threshold"] = 2.0
    if "rollout_rs" in preset:
        defaults["rs_threshold"] = preset["rollout_rs_threshold"]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [inspect.Parameter(name, kind, default=value) for name, value in defaults.items()]


def _factory(name: str) -> Callable[..., Any]:
    signature = inspect.Signature(_parameters(PRESETS[name]))

    def make(cls: type[Any], /, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        if "threshold_lower" in values:
            values["threshold"] = f"{values.pop('threshold_lower')}_{values['threshold']}"
        return rollout_correction_preset(name, cls, **{_SETTINGS[key]: value for key, value in values.items()})

    make.__name__, make.__qualname__ = name, f"RolloutCorrectionConfig.{name}"
    make.__doc__ = f"Return the settings of the preset `{name}`."
    return make


for _name in PRESETS:
    setattr(RolloutCorrectionConfig, _name, classmethod(_factory(_name)))
