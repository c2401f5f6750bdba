"""The times of the controller's phases and of each rank's calls: `timeline.jsonl`, one line per step.

A line has `step`, `started` (time of day) and `spans`: [name, rank, seconds after `started`, duration in seconds]. Rank
-1 is the controller.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from hybridrl.errors import UserError
from hybridrl.observe.jsonl import JsonLines, keep_records, read
from hybridrl.utils.spans import CONTROLLER, TimedSpan

TIMELINE = "timeline.jsonl"
_SHORT_S = 0.0005  # what is shorter on a rank cannot be seen and is not written
_ROWS = 34
_COLORS = ("#2563eb", "#059669", "#d97706", "#7c3aed", "#db2777", "#0891b2", "#65a30d", "#dc2626", "#475569", "#a16207")


class Timed(Protocol):
    """A worker group that knows when its ranks ran."""

    def take_spans(self) -> list[TimedSpan]:
        """The spans since the previous call."""
        ...


class Timeline:
    """Writes the spans of each step of a run into its folder.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / TIMELINE
        self._file = JsonLines(self._path)

    def __enter__(self) -> "Timeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, step: int, spans: Sequence[TimedSpan]) -> None:
        """Write what ran since the last report. A step may have several lines (its training, its validation).

        Phases of the controller are written however short they are: it may begin to wait when a rank has finished.
        """
        visible = (span for span in spans if span.seconds >= _SHORT_S or span.rank == CONTROLLER)
        long = sorted(visible, key=lambda span: span.started)
        if long:
            start = long[0].started
            rows = [[span.name, span.rank, round(span.started - start, 4), round(span.seconds, 4)] for span in long]
            self._file.write({"step": step, "started": round(start, 3), "spans": rows})

    def cut_after(self, step: int) -> None:
        """Remove the steps after `step`, which are done again."""
        self._file.close()
        keep_records(self._path, lambda record: int(record["step"]) <= step)
        self._file = JsonLines(self._path)


def read_timeline(folder: Path) -> dict[int, list[TimedSpan]]:
    """Return the spans of each step.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / TIMELINE
    spans_by_step: dict[int, list[TimedSpan]] = {}
    for record in read(path) if path.is_file() else ():
        try:
            start, spans = float(record["started"]), spans_by_step.setdefault(int(record["step"]), [])
            spans += [
                TimedSpan(str(name), int(rank), start + float(at), float(s)) for name, rank, at, s in record["spans"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); remove it") from error
    return spans_by_step


def rank_seconds(spans: Sequence[TimedSpan]) -> dict[str, dict[int, float]]:
    """Return the seconds of each rank in each method, by `<role>/<method>`."""
    seconds: dict[str, dict[int, float]] = {}
    for span in spans:
        if span.rank != CONTROLLER:
            of_ranks = seconds.setdefault(span.name, {})
            of_ranks[span.rank] = of_ranks.get(span.rank, 0.0) + span.seconds
    return seconds


@dataclass(frozen=True)
class Bar:
    """A span in the picture: place and size in percent of the width, and its row."""

    start: float
    width: float
    row: int
    color: str
    title: str


@dataclass(frozen=True)
class TimelinePicture:
    """The timeline of one step.

    Attributes:
        step: its number.
        seconds: from the first start to the last end.
        rows: their labels, from the top: the controller's phases, then one row per role and rank.
        bars: in the rows.
        legend: color of each method.
        left_out: ranks without a row, because there are too many.
    """

    step: int
    seconds: float
    rows: list[str]
    bars: list[Bar]
    legend: list[tuple[str, str]]
    left_out: int


def picture(step: int, spans: Sequence[TimedSpan]) -> TimelinePicture:
    """Lay out the spans of a step. Of many ranks, those that were busy longest have rows."""
    start = min(span.started for span in spans)
    seconds = max(max(span.started + span.seconds for span in spans) - start, 1e-9)
    phases = list(dict.fromkeys(span.name for span in spans if span.rank == CONTROLLER and span.name != "step"))
    busy: dict[tuple[str, int], float] = {}
    for span in spans:
        if span.rank != CONTROLLER:
            key = (span.name.partition("/")[0], span.rank)
            busy[key] = busy.get(key, 0.0) + span.seconds
    busiest = sorted(sorted(busy, key=lambda key: -busy[key])[: max(_ROWS - len(phases), 1)])
    rows: list[Any] = [*phases, *busiest]
    place = {key: number for number, key in enumerate(rows)}
    methods = list(dict.fromkeys(span.name for span in spans if span.rank != CONTROLLER))
    colors = {name: _COLORS[number % len(_COLORS)] for number, name in enumerate(methods)}
    bars = []
    for span in spans:
        is_phase = span.rank == CONTROLLER
        row = place.get(span.name if is_phase else (span.name.partition("/")[0], span.rank))
        if row is not None:
            who = span.name if is_phase else f"{span.name}, rank {span.rank}"
            offset = 100 * (span.started - start) / seconds
            color = "#94a3b8" if is_phase else colors[span.name]
            bars.append(Bar(offset, 100 * span.seconds / seconds, row, color, f"{who}: {span.seconds:.3f} s"))
    labels = [*phases, *(f"{role} {rank}" for role, rank in busiest)]
    return TimelinePicture(step, seconds, labels, bars, list(colors.items()), len(busy) - len(busiest))
