"""What the forecasts of memory of all programs share: how they are told, and what is refused."""

import copy
import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from hybridrl.config import OptimConfig
from hybridrl.errors import ConfigError, ModelError, PlacementError
from hybridrl.notify import notify
from hybridrl.single_controller.ray import RayWorkerGroup
from hybridrl.utils import device
from hybridrl.workers.forecast import Forecast, NotComputed

GIB = 1024**3
_MORE = "more devices (trainer.n_gpus_per_node, trainer.nnodes), shorter sequences or a smaller model"

Config = TypeVar("Config")
Found = TypeVar("Found", bound="MemoryForecast")
#: settings with their new values, and whether they suffice
Changes = tuple[list[tuple[str, Any]], bool]


class ForecastError(Exception):
    """A forecast that could not be computed, and why."""


class MemoryForecast(ABC):
    """Bytes per device of each phase of a run. Subclasses are dataclasses with these attributes.

    Attributes:
        roles: what each model takes; None where its engine cannot tell.
        engines: the setting that chose the engine of each role, `key=value`.
    """

    roles: Mapping[str, Forecast | None]
    engines: Mapping[str, str]

    @abstractmethod
    def phases(self) -> dict[str, float]:
        """The peak of each phase, on the devices where it runs."""

    def without_tokens(self) -> Self:
        """The same without what depends on how long sequences are."""
        roles = {
            name: one and replace(one, activations=0, logits=0, pass_activations=0) for name, one in self.roles.items()
        }
        return replace(self, roles=roles)  # type: ignore[type-var]

    @property
    def peak(self) -> float:
        """The most that any phase takes."""
        return max(self.phases().values(), default=0.0)

    def lines(self, total: float | None) -> list[str]:
        """Describe the forecast, phase by phase and model by model."""
        of = "" if total is None else f" of {total / GIB:.1f}"
        phases = ", ".join(f"{name} {size / GIB:.3g}" for name, size in self.phases().items())
        told = [f"memory forecast per device, GiB{of}: {phases or 'none'}"]
        for name, one in self.roles.items():
            if one is None:
                engine = self.engines.get(name, "its worker")
                told.append(f"{name}: {engine} has no forecast, so it is not counted")
                continue
            parts = {
                "weights": one.weights,
                "master weights": one.masters,
                "optimizer": one.states,
                "gradients": one.gradients,
                "gathered layers": one.gathered,
                "activations": one.activations,
                "logits": one.logits,
                "pass without gradients": one.pass_activations,
            }
            sizes = ", ".join(f"{what} {size / GIB:.3g}" for what, size in parts.items() if size)
            told.append("; ".join([f"{name}: {sizes}", f"kept between uses {one.resident / GIB:.3g}", *one.notes]))
        return told


def refuse_if_too_large(found: MemoryForecast, total: float, changes_that_fit: Callable[[], Changes]) -> None:
    """Refuse a run that cannot fit, and warn of one that cannot with sequences of full length.

    Args:
        found: its forecast.
        total: bytes of a device.
        changes_that_fit: finds settings that lower the peak.

    Raises:
        PlacementError: a phase takes more than a device has, however short sequences are; the error names the keys
            that would make it fit.
    """
    phases = found.phases()
    phase = max(phases, key=lambda name: phases[name], default=None)
    if phase is None or phases[phase] <= total:
        return
    changes, fits = changes_that_fit()
    remedy = "Set " + " ".join(f"{key}={value}" for key, value in changes) if changes else ""
    if not fits:
        remedy = f"{remedy}. That alone is not enough: use" if remedy else "Use"
        remedy += f" {_MORE}"
    problem = (
        f"the phase {phase} needs {phases[phase] / GIB:.3g} GiB per device, which has {total / GIB:.3g}. {remedy}. "
        "hybridrl forecast prints every part for the same settings"
    )
    if found.without_tokens().peak > total:
        raise PlacementError(problem)
    notify(f"with sequences of full length, {problem}", "warning")


def get_key(config: Any, key: str) -> Any:
    """The value at a dotted path; with an empty one, `config`."""
    for name in filter(None, key.split(".")):
        config = getattr(config, name)
    return config


def fewest_changes(
    config: Config,
    total: float,
    peak_of: Callable[[Config], float],
    candidates: Callable[[Config], Iterable[Mapping[str, Any]]],
    value_of: Callable[[Config, str], Any] = get_key,
) -> Changes:
    """Return settings that lower the peak, the cheapest first, as few as are needed, and whether they suffice.

    Args:
        config: the settings of the run, which stay as they are.
        total: bytes of a device.
        peak_of: the peak of a run with these settings.
        candidates: keys with their new values, to try in this order. It sees those that were taken before.
        value_of: returns the value of a key.
    """
    tried = copy.deepcopy(config)

    def lowered(settings: Mapping[str, Any]) -> float:
        """The peak with these settings, which stay set."""
        _set_keys(tried, settings)
        try:
            return peak_of(tried)
        except (ConfigError, ModelError, ForecastError):
            return math.inf  # one does not go together with another setting, or does not exist for this model

    peak = peak_of(tried)
    chosen: list[tuple[Mapping[str, Any], dict[str, Any]]] = []  # with the values before
    for settings in candidates(tried):
        if peak <= total:
            break
        before = {key: value_of(tried, key) for key in settings}
        lower = lowered(settings)
        if lower < 0.99 * peak:
            chosen.append((settings, before))
            peak = lower
        else:
            _set_keys(tried, before)
    fits = peak <= total
    for one in chosen[-2::-1] if fits else []:  # a later one may make an earlier one needless
        if lowered(one[1]) <= total:
            chosen.remove(one)
        else:
            _set_keys(tried, one[0])
    return [item for settings, _ in chosen for item in settings.items()], fits


def eight_bit_adam(where: str, optim: OptimConfig) -> dict[str, Any]:
    """The settings by which AdamW keeps its state in 8 bits; none where another class may not take the arguments.

    Args:
        where: the key of `optim`.
    """
    is_usual = (optim.optimizer, optim.optimizer_impl) == ("AdamW", "torch.optim")
    if not is_usual or optim.override_optimizer_config or importlib.util.find_spec("torchao") is None:
        return {}
    return {f"{where}.optimizer": "AdamW8bit", f"{where}.optimizer_impl": "torchao.optim"}


def set_key(config: Any, key: str, value: Any) -> None:
    """Set the value at a dotted path, whose parts are attributes or keys of mappings, which are added if needed."""
    *where, name = key.split(".")
    for part in where:
        if isinstance(config, MutableMapping) and config.get(part) is None:
            config[part] = {}
        config = config[part] if isinstance(config, MutableMapping) else getattr(config, part)
    if isinstance(config, MutableMapping):
        config[name] = value
    else:
        setattr(config, name, value)


def _set_keys(config: Any, settings: Mapping[str, Any]) -> None:
    """Set the values at dotted paths."""
    for key, value in settings.items():
        set_key(config, key, value)


def asked(group: RayWorkerGroup, method: str, *arguments: Any) -> Any:
    """What the first worker of a group forecasts.

    Raises:
        ForecastError: it could not.
    """
    found = group.execute_rank_zero_sync(method, *arguments)
    if isinstance(found, NotComputed):
        raise ForecastError(found.reason)
    return found


def check_group(
    group: RayWorkerGroup,
    forecast: Callable[[float], Found],
    refuse: Callable[[Found, float], None],
) -> Found | None:
    """Tell what a run on GPUs will take of their memory, and refuse one that cannot fit.

    Nothing is done without GPUs: processes share a machine's memory, and nothing reserves a part of it.

    Args:
        group: a worker group that has not loaded its model.
        forecast: computes the forecast for devices with so many bytes.
        refuse: raises an error if that is too large.

    Returns:
        The forecast, if there is one.
    """
    if not getattr(group.resource_pool, "use_gpu", False):
        return None
    try:
        total = min(fact["total_gb"] for fact in group.device_memory()) * GIB
        found = forecast(total)
    except Exception as error:  # a model that cannot be computed without weights can still be trained
        kind = "" if isinstance(error, ForecastError) else f"{type(error).__name__}: "
        notify(f"there is no forecast of memory: {kind}{error}")
        return None
    for line in found.lines(total):
        notify(line)
    refuse(found, total)
    return found


def print_found(
    forecast: Callable[[float | None], MemoryForecast],
    refuse: Callable[[MemoryForecast, float], None],
    pools: Sequence[Sequence[int]],
) -> None:
    """Print what a run takes on this machine's devices.

    Args:
        forecast: computes the forecast for GPUs with so many bytes, or without GPUs.
        refuse: raises an error if that is too large for a GPU.
        pools: processes per node of each pool.

    Raises:
        PlacementError: it does not fit on this machine's GPUs, or no engine of the run has a forecast.
    """
    total = device.memory_stats()["total_gb"] * GIB
    on_gpu = device.is_gpu()
    found = forecast(total if on_gpu else None)
    if not any(found.roles.values()):
        engines = ", ".join(dict.fromkeys(found.engines.values()))
        raise PlacementError(f"hybridrl forecast needs an engine with a forecast of memory, and {engines} has none")
    print("\n".join(found.lines(total if on_gpu else None)))
    if on_gpu:
        refuse(found, total)
        return
    processes = sum(pools[0])
    if found.peak * processes > total:
        notify(
            f"{processes} processes with {found.peak / GIB:.1f} GiB each need more than this machine has, "
            f"{total / GIB:.1f} GiB; lower trainer.n_gpus_per_node, or train on GPUs",
            "warning",
        )
