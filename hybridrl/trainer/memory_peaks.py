"""The peak of the devices' memory in each phase of a step, which is compared with the forecast."""

import importlib
import importlib.util
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from hybridrl.notify import notify

_GIB = 1024**3
_METRIC = "perf/memory_gb/"
_ALLOWED = 1.1  # of the forecast: what sizing.md promises


#: `package:function` that is called with the configuration and a worker group before models are loaded. It may refuse
#: the run, and returns an `ExpectedMemory` or None. A package that is not installed is no error.
MEMORY_CHECK = "hybridrl.forecast:check_before_loading"


class ExpectedMemory(Protocol):
    """The memory that a run is expected to take."""

    @property
    def is_complete(self) -> bool:
        """Whether all models of the run are counted."""

    def phases(self) -> Mapping[str, float]:
        """The peak of each phase in bytes, on the devices where it runs."""


def check_memory(config: Any, group: Any) -> ExpectedMemory | None:
    """Call `MEMORY_CHECK`.

    Raises:
        PlacementError: the run cannot fit on its devices.
    """
    package, _, name = MEMORY_CHECK.partition(":")
    if importlib.util.find_spec(package) is None:
        return None
    expected: ExpectedMemory | None = getattr(importlib.import_module(package), name)(config, group)
    return expected


class PhasePeaks:
    """Measures the peak of memory in each phase, of the fullest rank.

    Args:
        groups: worker groups, each with the phase that belongs to each of its methods.
        forecast: what was expected of the run; None where there is no forecast.
        apart: phases that are not compared with it.
    """

    def __init__(
        self,
        groups: Iterable[tuple[Any, Mapping[str, str]]],
        forecast: ExpectedMemory | None = None,
        apart: Collection[str] = (),
    ) -> None:
        self._groups = [(group, phases) for group, phases in groups if hasattr(group, "pop_memory_peaks")]
        self._expected: dict[str, float] = {}
        if forecast is not None and forecast.is_complete:
            self._expected = {phase: size / _GIB for phase, size in forecast.phases().items() if phase not in apart}

    def measure(self) -> dict[str, float]:
        """Return the peak in GiB of each phase since the last call, by phase, and compare it with the forecast."""
        largest: dict[str, float] = {}
        for group, phases in self._groups:
            for peaks in group.pop_memory_peaks():
                for method, peak in peaks.items():
                    phase = phases.get(method, method)
                    largest[phase] = max(peak, largest.get(phase, 0.0))
        self.compare(largest)
        return largest

    def compare(self, peaks: Mapping[str, float]) -> None:
        """Tell once, if a phase took more than a tenth above its forecast.

        Every step is looked at, because the optimizer's state is there from the second one on.

        Args:
            peaks: peaks in GiB by phase.
        """
        above = {
            phase: peak / self._expected[phase]
            for phase, peak in peaks.items()
            if peak > _ALLOWED * self._expected.get(phase, float("inf"))
        }
        if not above:
            return
        phase = max(above, key=lambda name: above[name])
        notify(
            f"the phase {phase} took {peaks[phase]:.3g} GiB, {above[phase]:.2f} times the forecast of "
            f"{self._expected[phase]:.3g} GiB, so longer sequences may need more than the forecast says. "
            "hybridrl forecast prints its parts",
            "warning",
        )
        self._expected = {}


def as_metrics(peaks: Mapping[str, float]) -> dict[str, float]:
    """`perf/memory_gb/<phase>` for each phase."""
    return {f"{_METRIC}{phase}": peak for phase, peak in peaks.items()}
