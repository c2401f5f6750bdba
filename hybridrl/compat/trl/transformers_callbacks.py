"""Callbacks of transformers, called with the events of a run."""

from __future__ import annotations

from typing import Any

from hybridrl.compat.trl.metric_names import with_trl_names
from hybridrl.trainer.callbacks import RunEvent

#: methods that are called here
CALLED = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")


class TransformersCallbacks:
    """A callback of hybridrl that calls those of transformers; `control.should_training_stop` stops the run.

    Args:
        callbacks: objects or classes that derive from `transformers.TrainerCallback`.
        args: TRL's config, which they get.
    """

    def __init__(self, callbacks: list[Any], args: Any) -> None:
        from transformers import TrainerControl, TrainerState

        self.callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self.args = args
        self.state = TrainerState()
        self.control = TrainerControl()

    def call(self, method: str, **more: Any) -> None:
        """Call one method of each."""
        for callback in self.callbacks:
            returned = getattr(callback, method)(self.args, self.state, self.control, **more)
            self.control = self.control if returned is None else returned

    def __call__(self, event: RunEvent) -> None:
        """Translate an event."""
        self.state.global_step, self.state.max_steps = event.step, event.total_steps
        logs = with_trl_names(event.metrics)
        if event.kind == "step":
            self.call("on_step_end")
        if event.kind == "checkpoint":
            self.call("on_save")
        else:
            self.state.log_history.append({**logs, "step": event.step})
            self.call("on_log", logs=logs)
        if event.kind == "validation":
            self.call("on_evaluate", metrics=logs)
        if self.control.should_training_stop:
            event.stop("a callback of transformers")
