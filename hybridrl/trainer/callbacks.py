"""Functions of the program that are called while a run trains: after a step, a validation, a checkpoint."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hybridrl.utils.termination import request_stop

EventKind = Literal["step", "validation", "checkpoint"]


@dataclass(frozen=True)
class RunEvent:
    """Something that a run has completed.

    Attributes:
        kind: `step`, `validation` or `checkpoint`.
        step: steps that are completed; 0: a validation before the first.
        total_steps: the step after which the run is complete.
        metrics: those of the step or of the validation, by name; empty for a checkpoint.
        folder: the run's folder, or that of the checkpoint.
    """

    kind: EventKind
    step: int
    total_steps: int
    folder: Path
    metrics: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def stop(self, reason: str = "a callback") -> None:
        """Have the run end after this step, with a checkpoint."""
        request_stop(reason)


Callback = Callable[[RunEvent], object]
_active: list[Callback] = []


@contextlib.contextmanager
def calling(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Have the runs of this process call the functions, within the block."""
    previous = list(_active)
    _active[:] = callbacks
    try:
        yield
    finally:
        _active[:] = previous


def emit(event: RunEvent) -> None:
    """Call every function with an event. What a function raises ends the run."""
    for callback in list(_active):
        callback(event)


class EventStream:
    """The events of a run that trains in a thread of its own, one after another. The run waits while one is looked at.

    Args:
        train: runs the training to its end.
        kinds: the kinds of events that are passed on.
    """

    def __init__(self, train: Callable[[], object], kinds: Sequence[EventKind]) -> None:
        self._train = train
        self._kinds = kinds
        self._events: queue.SimpleQueue[RunEvent | None] = queue.SimpleQueue()
        self._next = threading.Semaphore(0)
        self._closed = False
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[RunEvent]:
        """Start the run and yield its events. A loop that is left, or interrupted, ends it with a checkpoint.

        Raises:
            Exception: what ended the run.
        """
        thread = threading.Thread(target=self._run, name="training", daemon=True)
        thread.start()
        try:
            while (event := self._events.get()) is not None:
                yield event
                self._next.release()
        finally:
            self._closed = True
            if thread.is_alive():
                request_stop("the loop over its events was left")
            self._next.release()
            thread.join()
        if self._error is not None:
            raise self._error

    def emit(self, event: RunEvent) -> None:
        """Pass an event on and wait until the loop asks for the next one; called by the run."""
        if self._closed:
            event.stop("the loop over its events was left")  # the run was still starting then
        elif event.kind in self._kinds:
            self._events.put(event)
            self._next.acquire()

    def _run(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self._error = error
        finally:
            self._events.put(None)


class EarlyStopping:
    """A callback that stops a run when a metric has not improved.

    Args:
        metric: its name, such as `val/loss` or `critic/score/mean`.
        patience: how many values without a new best one stop the run.
        smaller_is_better: the best value is the smallest.
        min_change: a value is better if it is so by more than this.
    """

    def __init__(
        self, metric: str, patience: int = 3, *, smaller_is_better: bool = False, min_change: float = 0.0
    ) -> None:
        self.metric = metric
        self.patience = patience
        self.best = -math.inf
        self.waiting = 0
        self._sign = -1.0 if smaller_is_better else 1.0
        self._min_change = min_change

    def __call__(self, event: RunEvent) -> None:
        """Compare the metric, if the event has it, with the best value so far."""
        value = event.metrics.get(self.metric)
        if value is None:
            return
        if self._sign * float(value) > self.best + self._min_change:
            self.best, self.waiting = self._sign * float(value), 0
            return
        self.waiting += 1
        if self.waiting >= self.patience:
            event.stop(f"early stopping: {self.metric} has not improved in {self.waiting} values")
