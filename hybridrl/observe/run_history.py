"""Reads a run's folder for the report: curves by metric, settings, samples."""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hybridrl.errors import UserError
from hybridrl.observe import jsonl
from hybridrl.observe.events import read_events
from hybridrl.observe.run_folder import CHANGES, CONFIG, VERSIONS, read_changes
from hybridrl.observe.tracking import METRICS

# Metrics with a better direction, by the prefix of their names.
_HIGHER = ("val-core/", "val/accuracy", "train/accuracy", "critic/score/mean", "critic/rewards/mean", "perf/throughput")
_LOWER = ("train/loss", "val/loss", "critic/vf_loss", "timing_s/", "response/aborted_ratio")


@dataclass(frozen=True)
class Curve:
    """A metric over the run: `steps [K]` ascending and `values [K]`, including NaN and infinities."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def finite(self) -> "Curve":
        """The points with finite values."""
        finite = np.isfinite(self.values)
        return Curve(self.steps[finite], self.values[finite])

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class RunHistory:
    """The contents of a run's folder.

    Attributes:
        config: the settings of the last start.
        changes: what changed when the run was resumed, see `read_changes`.
    """

    folder: Path
    curves: dict[str, Curve]
    last_step: int
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)

    def steps(self) -> list[dict[str, float]]:
        """The finite metrics of each step, in order."""
        metrics_by_step: dict[int, dict[str, float]] = {}
        for name, curve in self.curves.items():
            for step, value in zip(curve.finite.steps.tolist(), curve.finite.values.tolist(), strict=True):
                metrics_by_step.setdefault(step, {})[name] = value
        return [metrics_by_step[step] for step in sorted(metrics_by_step)]

    @property
    def title(self) -> str:
        """`project / experiment` from the settings, or the folder's name."""
        trainer = self.config.get("trainer")
        names = (
            [trainer.get(key) for key in ("project_name", "experiment_name")] if isinstance(trainer, Mapping) else []
        )
        return " / ".join(str(name) for name in names if name) or self.folder.resolve().name

    def curve(self, name: str) -> Curve | None:
        """Return the finite points of a metric; None if there are none."""
        curve = self.curves.get(name)
        finite = curve.finite if curve is not None else None
        return finite if finite is not None and len(finite) else None

    def validation(self) -> list[str]:
        """Return the core validation metrics that have points, mean@N first."""
        names = [name for name in self.curves if name.startswith("val-core/") and not name.endswith("/std")]
        return sorted((name for name in names if self.curve(name)), key=lambda name: ("/mean@" not in name, name))

    def reward(self) -> str | None:
        """Return the metric that shows whether the run learns: the mean score, else the training loss."""
        names = ("critic/score/mean", "critic/rewards/mean", "train/loss")
        return next((name for name in names if self.curve(name)), None)

    def seconds(self) -> float | None:
        """Return the time of all steps together; None if it was not measured."""
        curve = self.curve("timing_s/step") or self.curve("perf/time_per_step")
        return float(curve.values.sum()) if curve else None


def direction(name: str) -> int:
    """Return +1 for a metric that should rise, -1 for one that should fall, and 0 without a better direction."""
    return 1 if name.startswith(_HIGHER) else -1 if name.startswith(_LOWER) else 0


def best(name: str, curve: Curve) -> tuple[float, int] | None:
    """Return the best value of a finite curve and its step; None for a metric without a better direction."""
    sign = direction(name)
    if sign == 0 or not len(curve):
        return None
    at = int(np.argmax(sign * curve.values))
    return float(curve.values[at]), int(curve.steps[at])


def load_history(folder: str | Path) -> RunHistory:
    """Read a run's folder.

    Several lines of one step are merged, and the later value of a metric wins. Settings and versions may be missing.

    Raises:
        UserError: there is no such folder, it has no metrics, or a line is damaged; the error names file and line.
    """
    folder = Path(folder)
    path = folder / METRICS
    if not path.is_file():
        raise UserError(f"{folder} has no {METRICS}: name a run's folder (trainer.default_local_dir)")
    points: dict[str, dict[int, float]] = {}
    last = 0
    for i, record in enumerate(jsonl.read(path), 1):
        step = record.get("step")
        if not isinstance(step, int):
            raise UserError(f"{path}, line {i} has step {step!r}; a line of metrics has an integer step")
        last = max(last, step)
        for name, value in record.items():
            number = jsonl.number(value)
            if name != "step" and number is not None:
                points.setdefault(name, {})[step] = number
    curves = {}
    for name, by_step in points.items():
        steps = sorted(by_step)
        curves[name] = Curve(np.asarray(steps), np.asarray([by_step[step] for step in steps], dtype=np.float64))
    config_text, changes = _text(folder / CONFIG), read_changes(folder)
    annotated = f"# {CHANGES}: settings that changed when the run was resumed\n{_text(folder / CHANGES)}\n{config_text}"
    return RunHistory(
        folder,
        curves,
        last,
        _latest(_config(config_text, folder), changes),
        annotated if changes else config_text,
        _versions(folder / VERSIONS),
        read_events(folder),
        changes,
    )


def _latest(first: dict[str, Any], changes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of the first start with those that changed since. A change of code is no setting."""
    config = copy.deepcopy(first)
    for entry in changes:
        for key, change in entry["changes"].items():
            *groups, name = key.split(".")
            group: Any = config
            for part in groups:
                group = group.get(part) if isinstance(group, dict) else None
            if isinstance(group, dict):
                group[name] = change["now"]
    return config


def _versions(path: Path) -> dict[str, Any]:
    try:
        versions = json.loads(_text(path) or "{}")
    except ValueError as exc:
        raise UserError(f"{path} is not valid JSON ({exc}): restore it or remove it") from exc
    return versions if isinstance(versions, dict) else {}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _config(text: str, folder: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(text) if text else {}
    except yaml.YAMLError as exc:
        raise UserError(f"{folder / CONFIG} is not valid YAML ({exc}): restore it or remove it") from exc
    return config if isinstance(config, dict) else {}


def show_number(value: float) -> str:
    """Format a number for display: four significant digits, thousands separated, `nan` as it is."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def show_seconds(seconds: float) -> str:
    """Format a duration: `42 s`, `3 min 20 s`, `5 h 12 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
