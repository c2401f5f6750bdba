"""The best checkpoint of a run by a metric of its validations, and the end of a run that finds no better one."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.checkpoint import save_json
from hybridrl.config import RunConfig
from hybridrl.errors import UserError
from hybridrl.observe.jsonl import number
from hybridrl.observe.run_folder import BEST

_SAME = ("val-core", "val-aux")


@dataclass(frozen=True)
class BestStep:
    """The best validation so far.

    Attributes:
        step: training steps that the weights have had.
        value: of the metric.
    """

    step: int
    value: float


class BestCheckpoint:
    """Follows `trainer.best_metric` from validation to validation.

    The validation before training does not count: it belongs to no checkpoint. All values are in `metrics.jsonl`, so a
    resumed run reads them there (`replay`) and needs no state of its own.

    Args:
        settings: `trainer` of the run.

    Attributes:
        metric: its name; None: nothing is followed.
        best: the best step of those that have a checkpoint; None: there is none yet.
        waiting: validations since the metric last improved by more than `trainer.early_stopping_threshold`.
        fault: why the metric cannot be followed; None: it can.
    """

    def __init__(self, settings: RunConfig) -> None:
        self.metric = settings.best_metric
        self.best: BestStep | None = None
        self.waiting = 0
        self.fault: str | None = None
        larger = settings.greater_is_better
        self._sign = 1.0 if (is_larger_better(self.metric or "") if larger is None else larger) else -1.0
        self._patience = settings.early_stopping_patience
        self._threshold = settings.early_stopping_threshold
        self._to_beat = -math.inf
        self._last_step = 0

    @property
    def ends_run(self) -> bool:
        """Whether there were as many validations without improvement as `trainer.early_stopping_patience` allows."""
        return self._patience is not None and self.waiting >= self._patience

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take a validation into account.

        Raises:
            UserError: it lacks the metric, and nothing was trained yet. Later this is a `fault`, which the caller
                raises once the step is saved.
        """
        if self.metric is None:
            return
        value = value_of(self.metric, metrics)
        if value is not None:
            self.fault = None
            self._add(step, value, has_checkpoint=True)
            return
        names = sorted(name for name in metrics if name.startswith(("val/", "val-")))
        self.fault = (
            f"trainer.best_metric={self.metric}: the validation of step {step} has no such number. Set it to one of "
            f"{', '.join(names)}"
        )
        if step == 0:
            raise UserError(self.fault)

    def replay(self, records: Iterable[Mapping[str, Any]], has_checkpoint: Callable[[int], bool]) -> None:
        """Take the validations of earlier starts of the run into account.

        Args:
            records: lines of `metrics.jsonl`.
            has_checkpoint: whether there is a checkpoint of a step. Without one, a step cannot be the best.
        """
        if self.metric is None:
            return
        for record in records:
            value = value_of(self.metric, record)
            if value is not None:
                self._add(int(record["step"]), value, has_checkpoint(int(record["step"])))

    def _add(self, step: int, value: float, has_checkpoint: bool) -> None:
        if step <= self._last_step:  # the validation before training, or one that was repeated (trainer.val_only)
            return
        self._last_step = step
        score = self._sign * value if math.isfinite(value) else -math.inf
        if has_checkpoint and score > (-math.inf if self.best is None else self._sign * self.best.value):
            self.best = BestStep(step, value)
        self.waiting += 1
        if score > self._to_beat + self._threshold:
            self._to_beat, self.waiting = score, 0

    def write(self, folder: Path, checkpoint: Path) -> None:
        """Name the best checkpoint in `best_checkpoint.json` of a run's folder."""
        assert self.best is not None
        record = {"metric": self.metric, "value": self.best.value, "step": self.best.step}
        save_json(folder / BEST, {**record, "checkpoint": checkpoint.name})

    def __str__(self) -> str:
        if self.best is None:
            return f"{self.metric} has no finite value"
        return f"the best value of {self.metric} is {self.best.value:.4g}, after step {self.best.step}"


def value_of(metric: str, metrics: Mapping[str, Any]) -> float | None:
    """Return the value of a metric of validations; None if there is no such number.

    Which variable of a data source is its core one depends on the scores that were seen so far: `val-core/` and
    `val-aux/` are not told apart.
    """
    prefix, _, rest = metric.partition("/")
    names = [f"{each}/{rest}" for each in _SAME] if prefix in _SAME else [metric]
    values = (number(metrics.get(name)) for name in names)
    return next((value for value in values if value is not None), None)


def is_larger_better(metric: str) -> bool:
    """Whether the largest value of a metric is the best one, by its name: of everything but losses."""
    return not metric.endswith("loss")
