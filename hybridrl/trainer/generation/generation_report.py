"""The progress output of a generation run, and the figures that it writes next to its output."""

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hybridrl.notify import notify
from hybridrl.observe.console import is_terminal
from hybridrl.trainer.generation.output_file import OutputFile, Response
from hybridrl.utils.files import write_text


class Report:
    """Context manager around the parts of a run. It prints one line per part, and a progress bar on a terminal.

    Args:
        output: the output that is written.
        missing: the parts that this run has to generate.
        key: `data.response_key`.
        bar: whether a terminal shows the bar.
    """

    def __init__(self, output: OutputFile, missing: int, key: str, bar: bool) -> None:
        self.output = output
        self.key = key
        self.tokens = 0
        self.done = len(output) - missing
        self._started = time.perf_counter()
        self._progress: Progress | None = None
        if bar and is_terminal(sys.stdout):
            columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._progress = Progress(TextColumn("[bold]parts"), *columns, refresh_per_second=2, expand=True)
            self._task = self._progress.add_task("parts", total=len(output), completed=self.done)
        self.resumed = self.done

    def __enter__(self) -> "Report":
        if self.done:
            notify(f"{self.output.folder}: {self.done} of {len(self.output)} parts are there, going on")
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def wrote(self, number: int, responses: Sequence[Sequence[Response]]) -> None:
        """Count a part and report it."""
        tokens = [response.tokens or 0 for of_row in responses for response in of_row]
        self.tokens += sum(tokens)
        self.done += 1
        line = (
            f"part {number + 1}/{len(self.output)}  rows {len(responses)}  length {np.mean(tokens):.1f}  "
            f"tok/s {self.tokens / self._seconds:.0f}  {self.done} of {len(self.output)} parts done"
        )
        if self._progress is not None:
            self._progress.console.print(line)
            self._progress.update(self._task, completed=self.done)
        else:
            print(line, flush=True)

    @property
    def _seconds(self) -> float:
        return max(time.perf_counter() - self._started, 1e-9)

    def finish(self) -> None:
        """Write `OUTPUT.metrics.json` for the whole output. The speed in it is that of this run alone."""
        seconds = self._seconds
        metrics = summary(self.output.path, self.key) | {
            "parts": len(self.output),
            "parts_of_earlier_runs": self.resumed,
            "seconds": seconds,
            "tokens_per_second": self.tokens / seconds,
        }
        path = metrics_path(self.output.path)
        write_text(path, json.dumps(metrics, indent=1) + "\n")
        print(f"{self.output.path}: {metrics['rows']} rows, {metrics['responses']} responses; figures in {path.name}")


def metrics_path(output: Path) -> Path:
    """Return the path of an output's figures."""
    return output.with_suffix(".metrics.json")


def summary(path: Path, key: str) -> dict[str, Any]:
    """Compute counts over all responses of an output."""
    names = [f"{key}_tokens", f"{key}_prompt_tokens", f"{key}_finish_reasons"]
    table = pq.read_table(path, columns=names)
    lengths = [length for row in table.column(names[0]).to_pylist() for length in row if length is not None]
    prompts = [tokens for tokens in table.column(names[1]).to_pylist() if tokens is not None]
    reasons = table.column(names[2]).to_pylist()
    return {
        "rows": table.num_rows,
        "responses": sum(map(len, reasons)),
        "prompt_tokens": sum(prompts),
        "response_tokens": sum(lengths),
        "response_length/mean": float(np.mean(lengths)) if lengths else None,
        "response_length/max": max(lengths, default=None),
        "finish_reasons": dict(Counter(str(reason) for row in reasons for reason in row).most_common()),
    }
