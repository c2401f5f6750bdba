"""Forecasts of training engines: which function computes the memory of an engine's models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hybridrl.config.entry_settings import engine_settings
from hybridrl.engine.train_engine import Engine, train_engine_class
from hybridrl.forecast.sizes import Forecast, Workload
from hybridrl.utils import device

#: gets the kind of model, its `ModelConfig`, the engine's settings, an `OptimConfig` (None for an engine that only
#: computes), the number of ranks and the workload; returns None where it cannot tell
EngineForecast = Callable[[str, Any, Any, Any, int, Workload], Forecast | None]
Function = TypeVar("Function", bound=EngineForecast)

#: by class; those of the library by their location, because importing an engine imports its library
_FORECASTS: dict[type[Engine] | str, EngineForecast | str] = {
    "hybridrl.engine.fsdp.engine:FSDPEngine": "hybridrl.forecast.fsdp_rank:forecast",
    "hybridrl.engine.megatron.engine:MegatronEngine": "hybridrl.forecast.megatron_rank:forecast",
}
#: what this process has computed: remedies are tried one after the other, and each changes one or two models
_COMPUTED: dict[str, Forecast | None] = {}


def forecasts_engine(engine: type[Engine]) -> Callable[[Function], Function]:
    """Function decorator: this function computes the memory of models of `engine` and of its subclasses."""

    def add(function: Function) -> Function:
        _FORECASTS[engine] = function
        return function

    return add


def forecast_engine(
    kind: str, strategy: str, model: Any, settings: Any, optim: Any, ranks: int, work: Workload
) -> Forecast | None:
    """Return the memory of one of `ranks` ranks of a model; None if its engine has no forecast.

    Args:
        kind: a name in `hybridrl.models.kinds.KINDS`.
        strategy: chooses the engine.
        model: a `ModelConfig`.
        settings: what the engine reads.
        optim: an `OptimConfig`; None for an engine that only computes.
        work: the largest batch.

    Raises:
        ModelError: the model's configuration cannot be read, or settings do not go together.
    """
    engine = train_engine_class(kind, strategy)
    places = ((cls, f"{cls.__module__}:{cls.__qualname__}") for cls in engine.__mro__)
    function = next((_FORECASTS[key] for keys in places for key in keys if key in _FORECASTS), None)
    if function is None:
        return None
    if isinstance(function, str):
        module, _, name = function.partition(":")
        function = getattr(importlib.import_module(module), name)
    file = Path(model.hf_config_path or model.path) / "config.json"
    changed = file.stat().st_mtime_ns if file.is_file() else 0
    where = device.get_device_name(), device.runs_triton()
    key = repr((engine, function, kind, model, changed, settings, optim, ranks, work, where))
    if key not in _COMPUTED:
        _COMPUTED[key] = function(kind, model, settings, optim, ranks, work)
    return _COMPUTED[key]


def forecast_part(kind: str, part: Any, model: Any, optim: Any, ranks: int, work: Workload) -> Forecast | None:
    """The same for the settings of a role, which have `strategy` and a group for its engine."""
    return forecast_engine(kind, part.strategy, model, engine_settings(part, model.external_lib), optim, ranks, work)
