"""Sends a run's metrics to `metrics.jsonl`, always, and to the services of `trainer.logger`."""

import difflib
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridrl.errors import UserError
from hybridrl.notify import notify
from hybridrl.observe import backends
from hybridrl.observe.backends import Backend, Rows
from hybridrl.observe.console import ConsoleLogger
from hybridrl.observe.dump import cut_dumps_after
from hybridrl.observe.jsonl import JsonLines, keep_records, number, plain, read
from hybridrl.utils.files import write_text

METRICS = "metrics.jsonl"
MEMORY = "tracking.json"
_TRACKING = "bash scripts/install.sh auto tracking"
_MAX_FAILURES = 3

# Name -> (class, package to import, how to get it).
_SERVICES: dict[str, tuple[Callable[..., Backend], str, str]] = {
    "tensorboard": (backends.TensorboardBackend, "tensorboard", _TRACKING),
    "wandb": (backends.WandbBackend, "wandb", _TRACKING),
    "mlflow": (backends.MlflowBackend, "mlflow", _TRACKING),
    "swanlab": (backends.SwanlabBackend, "swanlab", _TRACKING),
    "trackio": (backends.TrackioBackend, "trackio", _TRACKING),
    "clearml": (backends.ClearmlBackend, "clearml", "pip install clearml"),
}
TRACKERS = ("console", "file", *_SERVICES)
_NOT_HERE = {
    "vemlp_wandb": "use wandb, with WANDB_BASE_URL set to the service",
    "rl_insight": "use tensorboard or wandb; `report.html` in the run's folder has the curves",
}


class TrackingError(UserError):
    """A tracking service is unknown, not installed, or could not be opened."""


def as_names(loggers: str | Iterable[str] | None) -> list[str]:
    """Return `trainer.logger` (one name, a list, or nothing) as a list without duplicates."""
    if loggers is None:
        return []
    return list(dict.fromkeys([loggers] if isinstance(loggers, str) else loggers))


def check_loggers(names: str | Iterable[str] | None) -> None:
    """Refuse services that cannot be used, before the work starts.

    Raises:
        TrackingError: a name is unknown or a package is missing. The error lists all of them, with the nearest known
            name and the command that installs the package.
    """
    faults = []
    for name in as_names(names):
        if name in _NOT_HERE:
            faults.append(f"{name!r} is not supported: {_NOT_HERE[name]}")
        elif name not in TRACKERS:
            near = difflib.get_close_matches(str(name), TRACKERS, n=1)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            faults.append(f"{name!r} is unknown; choose from {', '.join(TRACKERS)}.{guess}")
        elif name in _SERVICES and not _installed(_SERVICES[name][1]):
            faults.append(
                f"{name!r} needs the package {_SERVICES[name][1]}, which is not installed: {_SERVICES[name][2]}"
            )
    if faults:
        raise TrackingError("trainer.logger: " + "\n  ".join(faults))


def _installed(package: str) -> bool:
    """Return whether the package is installed. A folder `wandb/` that runs left in the working directory is not one."""
    if package in sys.modules:
        return sys.modules[package] is not None
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


class Tracking:
    """Writes the metrics of each step to the run's file and sends them to every requested service.

    `metrics.jsonl` is always written first: one line `{"step": N, "<metric>": value, ...}`, complete before `log`
    returns. If a service fails during the run (for example because the network is down), a notice names it and
    the step. After three failures in a row it is no longer used; the file has everything.

    Args:
        loggers: `trainer.logger`: one name or a list of names from `TRACKERS`.
        project, experiment: `trainer.project_name`, `trainer.experiment_name`.
        folder: the run's folder; created if missing.
        config: the resolved settings as nested dicts, for services that store them.
        total_steps: number of steps, for the progress bar.
        progress_bar: whether the console shows one on a terminal.
        dump_folders: folders with the samples of each step, which are cut together with the metrics; by default
            `rollouts/` and `validation/` in the run's folder.
        notice: called with each message for the user; by default, messages are printed to stderr.

    Raises:
        TrackingError: see `check_loggers`, or a service could not be opened.
    """

    def __init__(
        self,
        loggers: str | Iterable[str] | None,
        project: str,
        experiment: str,
        folder: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        total_steps: int | None = None,
        progress_bar: bool = True,
        dump_folders: Sequence[str | Path] | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        names = as_names(loggers)
        check_loggers(names)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        default = (self.folder / "rollouts", self.folder / "validation")
        self._dump_folders = [Path(path) for path in (default if dump_folders is None else dump_folders)]
        self._notice = notice or notify
        self._file = JsonLines(self.folder / METRICS)
        self._memory = self._read_memory()
        self._failures: dict[str, int] = {}
        self._console: ConsoleLogger | None = None
        self._backends: dict[str, Backend] = {}
        self._arguments = (project, experiment, self.folder, plain(config or {}))
        for name in names:
            self._open(name)
        self._save_memory()
        if "console" in names:
            self._console = self._backends["console"] = ConsoleLogger(total_steps, bar=progress_bar)

    def _read_memory(self) -> dict[str, Any]:
        path = self.folder / MEMORY
        if not path.exists():
            return {}
        try:
            memory = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise TrackingError(f"{path} cannot be read ({exc}): remove it to start new online runs") from exc
        if not isinstance(memory, dict):
            raise TrackingError(f"{path} is not what was saved there: remove it to start new online runs")
        return memory

    def _open(self, name: str) -> None:
        if name not in _SERVICES:
            return
        try:
            self._backends[name] = _SERVICES[name][0](*self._arguments, self._memory.setdefault(name, {}))
        except Exception as exc:
            self.finish(failed=True)
            raise TrackingError(
                f"trainer.logger: {name} could not be opened ({type(exc).__name__}: {exc}). Fix it, or take "
                f"{name} out of trainer.logger; {METRICS} in the run's folder is written in any case."
            ) from exc

    def _save_memory(self) -> None:
        if any(self._memory.values()) or (self.folder / MEMORY).exists():
            write_text(self.folder / MEMORY, json.dumps(self._memory, indent=1))

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log the metrics of a step.

        Args:
            metrics: name -> number (Python, NumPy or one-element tensor).
            step: the number of the step.

        Raises:
            ValueError: a value is not a single number, or a metric is called `step`; the error names it.
        """
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        self._file.write({"step": step, **numbers})
        self._each(step, lambda backend: backend.log(numbers, step))

    def log_generations(self, rows: Rows, step: int) -> None:
        """Send samples (`input`, `output`, `score`, ...) to the services that show tables. Dumps are separate."""
        if rows:
            self._each(step, lambda backend: backend.log_generations(rows, step))

    def status(self, text: str) -> None:
        """Show on the console what the run is doing (the name of a phase)."""
        if self._console is not None:
            self._console.status(text)

    def _each(self, step: int, send: Callable[[Backend], None]) -> None:
        for name, backend in list(self._backends.items()):
            if not backend.can_cut and step <= self._memory.get("sent_up_to", -1):
                continue
            if name == "console":
                send(backend)
                continue
            try:
                send(backend)
                self._failures[name] = 0
            except Exception as exc:  # a service that is down must not end the run; the file has the numbers
                self._failures[name] = self._failures.get(name, 0) + 1
                gone = self._failures[name] >= _MAX_FAILURES
                if gone:
                    del self._backends[name]
                end = "it is left out from here on" if gone else "it is tried again at the next step"
                self._notice(f"{name} did not take step {step} ({type(exc).__name__}: {exc}); {end}, {METRICS} has it")

    def cut_after(self, step: int) -> None:
        """Continue from `step`: remove every later metric and dump. With -1 the run starts over in this folder.

        The file, the dumps and tensorboard lose the later steps. Services that cannot delete steps are sent nothing
        until the run has passed the steps that they have. If the run starts over, they start a new run.
        """
        self._file.close()
        path = self.folder / METRICS
        last = max((int(record["step"]) for record in read(path)), default=-1)
        if last > step:
            self._cut_services(step, last)
            keep_records(path, lambda record: int(record["step"]) <= step)
        self._file = JsonLines(path)
        for folder in self._dump_folders:
            cut_dumps_after(folder, step)
        for backend in self._backends.values():
            if backend.can_cut:
                backend.cut_after(step)

    def _cut_services(self, step: int, last: int) -> None:
        permanent = [name for name, backend in self._backends.items() if not backend.can_cut]
        if step >= 0:
            self._memory["sent_up_to"] = max(last, self._memory.get("sent_up_to", -1))
        else:
            self._memory.clear()
            for name in permanent:
                self._backends.pop(name).finish(failed=False)
                self._open(name)
        if permanent:
            self._save_memory()

    def finish(self, failed: bool = False) -> None:
        """Close everything. A second call does nothing."""
        self._file.close()
        for name, backend in list(self._backends.items()):
            try:
                backend.finish(failed)
            except Exception as exc:  # as in _each: a failing service must not fail the run
                self._notice(f"{name} could not be closed ({type(exc).__name__}: {exc}); {METRICS} has everything")
        self._backends.clear()
        self._console = None

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish(failed=kind is not None)


def _number(name: str, value: Any) -> float | int:
    if name == "step":
        raise ValueError("a metric is called 'step', which is the line's own key: give it another name")
    plain_value = plain(value)
    if isinstance(plain_value, list) and len(plain_value) == 1:
        plain_value = plain_value[0]
    if isinstance(plain_value, bool):
        return int(plain_value)
    if isinstance(plain_value, (int, float)):
        return plain_value
    special = number(plain_value) if not isinstance(value, str) else None
    if special is None or math.isfinite(special):
        raise ValueError(f"metric {name!r} is {value!r} ({type(value).__name__}); a metric is one number")
    return special
