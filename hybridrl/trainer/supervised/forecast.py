"""The memory that supervised fine-tuning will take, computed before its model is loaded."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.config import SFTTrainerConfig
from hybridrl.registry import import_external_lib
from hybridrl.single_controller.ray import RayWorkerGroup
from hybridrl.trainer import forecast as shared
from hybridrl.trainer.forecast import MemoryForecast, get_key
from hybridrl.workers.forecast import Forecast, forecast_model

ForModel = Callable[[SFTTrainerConfig, int], Forecast | None]

_ROLE = "model"
#: changes that save memory, the cheapest first: the key and its value
_CHANGES: tuple[tuple[str, Any], ...] = (
    ("model.use_fused_kernels", True),
    ("data.max_token_len_per_gpu", "a sequence"),
    ("model.enable_gradient_checkpointing", True),
    ("model.recompute_granularity", "full"),
    ("engine.offload_policy", True),
)


@dataclass(frozen=True)
class TuningForecast(MemoryForecast):
    """Bytes per device of each phase of fine-tuning."""

    roles: Mapping[str, Forecast | None]
    engines: Mapping[str, str]

    def phases(self) -> dict[str, float]:
        one = self.roles[_ROLE]
        if one is None:
            return {}
        validates = {"testing": one.without_gradients} if one.pass_activations else {}
        return {"update_model": one.update, **validates}


def forecast_tuning(config: SFTTrainerConfig, compute: ForModel = forecast_model) -> TuningForecast:
    """Compute the forecast.

    Args:
        config: the settings of the run.
        compute: `forecast_model`, in a process that has a device of the kind that the model will have.
    """
    engines = {_ROLE: f"engine.strategy={config.engine.strategy}"}
    return TuningForecast({_ROLE: compute(config, sum(_pool(config)))}, engines)


def changes_that_fit(config: SFTTrainerConfig, total: float, compute: ForModel = forecast_model) -> shared.Changes:
    """Return settings that lower the peak, the cheapest first, as few as are needed, and whether they suffice."""
    return shared.fewest_changes(config, total, lambda tried: forecast_tuning(tried, compute).peak, _candidates)


def _candidates(config: SFTTrainerConfig) -> Iterator[tuple[str, Any]]:
    for key, value in _CHANGES:
        if value == "a sequence":
            if get_key(config, key) > config.data.max_length:
                yield key, config.data.max_length
        elif get_key(config, key) != value:
            yield key, value


def _pool(config: SFTTrainerConfig) -> list[int]:
    return list(config.placement.pools[config.placement.roles[_ROLE]])


def check_before_loading(config: SFTTrainerConfig, group: RayWorkerGroup) -> None:
    """Tell what fine-tuning on GPUs will take of their memory, and refuse a run that cannot fit.

    Args:
        config: the settings of the run.
        group: its workers, on whose first rank the forecast is computed.

    Raises:
        PlacementError: it cannot fit; see `hybridrl.trainer.forecast.refuse_if_too_large`.
    """

    def compute(config: SFTTrainerConfig, ranks: int) -> Forecast | None:
        found: Forecast | None = group.execute_rank_zero_sync("forecast_model", config, ranks)
        return found

    shared.check_group(
        group,
        lambda _: forecast_tuning(config, compute),
        lambda found, total: shared.refuse_if_too_large(found, total, lambda: changes_that_fit(config, total, compute)),
    )


def print_forecast(config: SFTTrainerConfig) -> None:
    """The program `hybridrl forecast sft`: print what fine-tuning with these settings takes on this machine's devices.

    Raises:
        PlacementError: it does not fit on this machine's GPUs, or its engine has no forecast.
    """
    import_external_lib(config.model.external_lib)
    shared.print_found(
        lambda _: forecast_tuning(config),
        lambda found, total: shared.refuse_if_too_large(found, total, lambda: changes_that_fit(config, total)),
        [_pool(config)],
    )
