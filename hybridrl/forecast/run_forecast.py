"""The memory of a run's phases: its lines, and the refusal of a run that cannot fit."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from hybridrl.errors import PlacementError
from hybridrl.forecast.role_models import NotComputed, attempted
from hybridrl.forecast.sizes import Forecast
from hybridrl.notify import notify
from hybridrl.single_controller.ray import RayWorkerGroup
from hybridrl.utils import device

GIB = 1024**3
_MORE = "more devices (trainer.n_gpus_per_node, trainer.nnodes), shorter sequences or a smaller model"

ForecastT = TypeVar("ForecastT", bound="MemoryForecast")
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
            name: model and replace(model, activations=0, logits=0, pass_activations=0)
            for name, model in self.roles.items()
        }
        return replace(self, roles=roles)  # type: ignore[type-var]

    @property
    def is_complete(self) -> bool:
        """Whether every model of the run has a forecast."""
        return all(model is not None for model in self.roles.values())

    @property
    def peak(self) -> float:
        """The most that any phase takes."""
        return max(self.phases().values(), default=0.0)

    def lines(self, total: float | None) -> list[str]:
        """Describe the forecast, phase by phase and model by model."""
        of = "" if total is None else f" of {total / GIB:.1f}"
        phases = ", ".join(f"{name} {size / GIB:.3g}" for name, size in self.phases().items())
        lines = [f"memory forecast per device, GiB{of}: {phases or 'none'}"]
        for name, model in self.roles.items():
            if model is None:
                engine = self.engines.get(name, "its worker")
                lines.append(f"{name}: {engine} has no forecast, so it is not counted")
                continue
            parts = {
                "weights": model.weights,
                "master weights": model.masters,
                "optimizer": model.states,
                "gradients": model.gradients,
                "gathered layers": model.gathered,
                "activations": model.activations,
                "logits": model.logits,
                "pass without gradients": model.pass_activations,
            }
            sizes = ", ".join(f"{part} {size / GIB:.3g}" for part, size in parts.items() if size)
            lines.append("; ".join([f"{name}: {sizes}", f"kept between uses {model.resident / GIB:.3g}", *model.notes]))
        return lines


def refuse_if_too_large(expected: MemoryForecast, total: float, changes_that_fit: Callable[[], Changes]) -> None:
    """Refuse a run that cannot fit, and warn of one that cannot with sequences of full length.

    Args:
        expected: its forecast.
        total: bytes of a device.
        changes_that_fit: finds settings that lower the peak.

    Raises:
        PlacementError: a phase takes more than a device has, however short sequences are; the error names the keys
            that would make it fit.
    """
    phases = expected.phases()
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
    if expected.without_tokens().peak > total:
        raise PlacementError(problem)
    notify(f"with sequences of full length, {problem}", "warning")


def on_first_worker(group: RayWorkerGroup, compute: Callable[..., Any], *arguments: Any) -> Any:
    """Return `compute(*arguments)`, computed by the first worker of a group.

    Raises:
        ForecastError: it could not.
    """
    result = group.execute_rank_zero_sync("execute_func_rank_zero", attempted, compute, *arguments)
    if isinstance(result, NotComputed):
        raise ForecastError(result.reason)
    return result


def check_group(
    group: RayWorkerGroup,
    forecast: Callable[[float], ForecastT],
    refuse: Callable[[ForecastT, float], None],
) -> ForecastT | None:
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
        total = min(device["total_gb"] for device in group.device_memory()) * GIB
        expected = forecast(total)
    except Exception as error:  # a model that cannot be computed without weights can still be trained
        kind = "" if isinstance(error, ForecastError) else f"{type(error).__name__}: "
        notify(f"there is no forecast of memory: {kind}{error}")
        return None
    for line in expected.lines(total):
        notify(line)
    refuse(expected, total)
    return expected


def print_expected(
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
    expected = forecast(total if on_gpu else None)
    if not any(expected.roles.values()):
        engines = ", ".join(dict.fromkeys(expected.engines.values()))
        raise PlacementError(f"hybridrl forecast needs an engine with a forecast of memory, and {engines} has none")
    print("\n".join(expected.lines(total if on_gpu else None)))
    if on_gpu:
        refuse(expected, total)
        return
    processes = sum(pools[0])
    if expected.peak * processes > total:
        notify(
            f"{processes} processes with {expected.peak / GIB:.1f} GiB each need more than this machine has, "
            f"{total / GIB:.1f} GiB; lower trainer.n_gpus_per_node, or train on GPUs",
            "warning",
        )
