"""Console output of a run: a progress bar on a terminal, and one plain line per step everywhere."""

import math
import os
import sys
from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from hybridrl.notify import write_out

# Metric, label, format: a step's line shows those that the step has, in this order.
IMPORTANT = (
    ("critic/score/mean", "score", ".3f"),
    ("critic/rewards/mean", "reward", ".3f"),
    ("train/loss", "loss", ".4f"),
    ("train/accuracy", "accuracy", ".3f"),
    ("train/margin", "margin", ".3f"),
    ("actor/pg_loss", "pg_loss", "+.4f"),
    ("critic/vf_loss", "vf_loss", ".4f"),
    ("actor/ppo_kl", "ppo_kl", ".1e"),
    ("actor/kl_loss", "kl_loss", ".1e"),
    ("actor/reward_kl_penalty", "kl_penalty", ".1e"),
    ("actor/entropy", "entropy", ".3f"),
    ("actor/grad_norm", "grad", ".2f"),
    ("train/grad_norm", "grad", ".2f"),
    ("response_length/mean", "length", ".1f"),
    ("actor/lr", "lr", ".1e"),
    ("train/lr", "lr", ".1e"),
    ("perf/throughput", "tok/s", ".0f"),
    ("timing_s/step", "time", ".2f"),
)
_VALIDATION = ("val-core/", "val/loss", "val/accuracy", "val/margin")


def is_terminal(stream: IO[str]) -> bool:
    """Return whether the stream supports cursor movements."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _format(value: float, spec: str) -> str:
    return format(value, spec) if math.isfinite(value) else str(value)


def step_line(metrics: Mapping[str, float], step: int, total: int | None) -> str:
    """Return the important metrics of a step; empty if it has none of them.

    The reward is shown only if it differs from the score (if it includes a KL penalty).
    """
    width = len(str(total)) if total else 1
    parts = []
    for name, label, spec in IMPORTANT:
        if name not in metrics:
            continue
        if name == "critic/rewards/mean" and metrics.get("critic/score/mean") == metrics[name]:
            continue
        unit = "s" if label == "time" else ""
        parts.append(f"{label} {_format(float(metrics[name]), spec)}{unit}")
    if not parts:
        return ""
    return f"step {step:>{width}}{f'/{total}' if total else ''}  " + "  ".join(parts)


def validation_line(metrics: Mapping[str, float], step: int, total: int | None) -> str:
    """Return the core validation metrics of a step; empty if there are none."""
    width = len(str(total)) if total else 1
    parts = []
    for name, value in metrics.items():
        if name.startswith(_VALIDATION) and not name.endswith("/std"):
            parts.append(f"{name.removeprefix('val-core/')} {_format(float(value), '.4f')}")
    return f"step {step:>{width}}{f'/{total}' if total else ''}  validation  " + "  ".join(parts) if parts else ""


class ConsoleLogger:
    """Prints the lines, with a progress bar below them on a terminal.

    Without a terminal (a pipe, a log file, a batch job) every line is printed at once, as plain text without control
    characters.

    Args:
        total: number of steps of the run, for the bar and `step 3/150`; None if unknown.
        stream: where to print; by default, stdout at the time of printing.
        bar: whether a terminal shows the bar.
    """

    can_cut = True

    def __init__(self, total: int | None = None, stream: IO[str] | None = None, bar: bool = True) -> None:
        self._total = total
        self._stream = stream
        self._progress: Progress | None = None
        if bar and is_terminal(stream or sys.stdout):
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(file=stream),
                refresh_per_second=2,
                expand=True,
            )
            self._task = self._progress.add_task("train", total=total)
            self._progress.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Print a step's line and its validation line."""
        line, validation = step_line(metrics, step, self._total), validation_line(metrics, step, self._total)
        for text, style in ((line, ""), (validation, "bold green")):
            if text:
                self._print(text, style)
        if self._progress is not None and line:
            self._progress.update(self._task, completed=step)

    def status(self, text: str) -> None:
        """Show what the run is doing, to the left of the bar. Without a terminal, do nothing."""
        if self._progress is not None:
            self._progress.update(self._task, description=text)

    def log_generations(self, rows: Any, step: int) -> None:
        """Do nothing: samples are in the dumps, not on the console."""

    def cut_after(self, step: int) -> None:
        """Continue from a step: the bar starts there."""
        if self._progress is not None:
            self._progress.update(self._task, completed=max(0, step))

    def _print(self, text: str, style: str) -> None:
        if self._progress is not None:
            console = self._progress.console
            write_out(lambda: console.print(Text(text, style=style)))
        else:
            write_out(lambda: print(text, file=self._stream or sys.stdout, flush=True))

    def finish(self, failed: bool) -> None:
        """Leave the bar as it is."""
        if self._progress is not None:
            write_out(self._progress.stop)
            self._progress = None
