"""The memory that supervised training will take, computed before its models are loaded."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.config import PairsDataConfig, SupervisedConfig
from hybridrl.config.dotted import get_key
from hybridrl.config.unread import unread_by
from hybridrl.forecast import remedies, run_forecast
from hybridrl.forecast.role_models import forecast_model
from hybridrl.forecast.run_forecast import Changes, MemoryForecast, on_first_worker
from hybridrl.forecast.sizes import Forecast
from hybridrl.registry import OBJECTIVES, import_external_lib
from hybridrl.single_controller.ray import RayWorkerGroup

ForModel = Callable[[SupervisedConfig, int, str], Forecast | None]

_ROLE, _REFERENCE = "model", "reference"
#: changes that save memory, the cheapest first: the key and its value. The last one also changes the results a little.
_CHANGES: tuple[tuple[str, Any], ...] = (
    ("model.use_fused_kernels", True),
    ("reference", "cache"),
    ("data.max_token_len_per_gpu", "a row"),
    ("model.enable_gradient_checkpointing", True),
    ("model.recompute_granularity", "full"),
    ("model.enable_activation_offload", True),
    ("model.tiled_mlp.enabled", True),
    ("engine.sequence_parallel", True),
    ("engine.use_distributed_optimizer", True),
    ("engine.grad_offload", True),
    ("engine.param_offload", True),
    ("engine.offload_policy", "several ranks"),
    ("optim", "8 bits"),
)


@dataclass(frozen=True)
class TuningForecast(MemoryForecast):
    """Bytes per device of each phase of training."""

    roles: Mapping[str, Forecast | None]
    engines: Mapping[str, str]

    def phases(self) -> dict[str, float]:
        model, frozen = self.roles[_ROLE], self.roles.get(_REFERENCE)
        if model is None:
            return {}
        beside = frozen.resident if frozen else 0
        peaks: dict[str, float] = {"update_model": model.update + beside}
        if model.pass_activations:
            peaks["testing"] = model.without_gradients + beside
        if frozen:
            peaks["reference"] = model.resident + frozen.without_gradients
        return peaks


def forecast_tuning(config: SupervisedConfig, compute: ForModel = forecast_model) -> TuningForecast:
    """Compute the forecast.

    Args:
        config: the settings of the run.
        compute: `forecast_model`, in a process that has a device of the kind that the model will have.
    """
    names = [_ROLE]
    if config.reference == "model":
        names.append(_REFERENCE)
    engines = dict.fromkeys(names, f"engine.strategy={config.engine.strategy}")
    return TuningForecast({name: compute(config, sum(_pool(config)), name) for name in names}, engines)


def changes_that_fit(config: SupervisedConfig, total: float, compute: ForModel = forecast_model) -> Changes:
    """Return settings that lower the peak, the cheapest first, as few as are needed, and whether they suffice."""
    return remedies.fewest_changes(config, total, lambda settings: forecast_tuning(settings, compute).peak, _candidates)


def _candidates(config: SupervisedConfig) -> Iterator[dict[str, Any]]:
    for key, value in _CHANGES:
        if unread_by(config, "engine.offload_policy" if key == "optim" else key):  # engines with 8-bit optimizers
            continue
        if value == "a row":
            longest = config.data.max_length * (2 if isinstance(config.data, PairsDataConfig) else 1)
            if get_key(config, key) > longest:
                yield {key: longest}
        elif value == "cache":
            if config.reference == "model" and not OBJECTIVES.metadata(config.objective.loss_type).kl_baseline:
                yield {f"{config.objective_group}.{key}": value}
        elif value == "several ranks":
            if sum(_pool(config)) > 1 and not get_key(config, key):
                yield {key: True}
        elif value == "8 bits":
            if settings := remedies.eight_bit_adam(key, config.optim):
                yield settings
        elif get_key(config, key) != value:
            yield {key: value}


def _pool(config: SupervisedConfig) -> list[int]:
    return list(config.placement.pools[config.placement.roles[_ROLE]])


def check_before_loading(config: SupervisedConfig, group: RayWorkerGroup) -> TuningForecast | None:
    """Tell what training on GPUs will take of their memory, and refuse a run that cannot fit.

    Args:
        config: the settings of the run.
        group: its workers, on whose first rank the forecast is computed.

    Returns:
        The forecast, if there is one.

    Raises:
        PlacementError: it cannot fit; see `hybridrl.forecast.run_forecast.refuse_if_too_large`.
    """

    def compute(config: SupervisedConfig, ranks: int, role: str) -> Forecast | None:
        forecast: Forecast | None = on_first_worker(group, forecast_model, config, ranks, role)
        return forecast

    return run_forecast.check_group(
        group,
        lambda _: forecast_tuning(config, compute),
        lambda expected, total: run_forecast.refuse_if_too_large(
            expected, total, lambda: changes_that_fit(config, total, compute)
        ),
    )


def print_forecast(config: SupervisedConfig) -> None:
    """The programs `hybridrl forecast sft`, `dpo`, `kto` and `rm`: print what training takes on this machine's devices.

    Raises:
        PlacementError: it does not fit on this machine's GPUs, or its engine has no forecast.
    """
    import_external_lib(config.model.external_lib)
    run_forecast.print_expected(
        lambda _: forecast_tuning(config),
        lambda expected, total: run_forecast.refuse_if_too_large(
            expected, total, lambda: changes_that_fit(config, total)
        ),
        [_pool(config)],
    )
