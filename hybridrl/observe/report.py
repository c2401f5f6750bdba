"""A run on one page: `report.html` (self-contained, no network), `report.png`, and a summary for the terminal.

`python -m hybridrl.observe.report FOLDER` writes all three for a run, even while it is in progress.
"""

import argparse
import importlib
import importlib.util
import io
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.panel import Panel as Box
from rich.table import Table
from rich.text import Text

from hybridrl.config.differences import differences
from hybridrl.errors import UserError
from hybridrl.notify import write_out
from hybridrl.observe import textplot
from hybridrl.observe.advisor import Advice, advise
from hybridrl.observe.events import END, RESUME, START, RunStart, sessions
from hybridrl.observe.report_samples import samples
from hybridrl.observe.rollouts import ROLLOUTS, write_rollouts
from hybridrl.observe.run_history import RunHistory, best, load_history, show_number, show_seconds
from hybridrl.observe.timeline import TimelinePicture, picture, read_timeline
from hybridrl.observe.tracking import METRICS
from hybridrl.utils.files import replacing

if TYPE_CHECKING:
    from hybridrl.observe.figures import Chart

REPORT, PICTURE = "report.html", "report.png"
#: `module:function` that is called with a run's folder and returns its phases with measured and predicted seconds
PREDICTION = "hybridrl.plan.calibration:compare"
_MAX_TEXT = 4000

_TEMPLATE = "report.html.jinja"
_KINDS = (("Validation samples", "validation"), ("Training samples", "rollouts"))


def write_report(folder: str | Path) -> Path:
    """Write `report.html`, `report.png` and, where the run dumped samples, `rollouts.html` into a run's folder.

    They use the data that exists. Missing metrics have no chart, and values that are not finite leave a gap.

    Returns:
        Path of `report.html`.

    Raises:
        UserError: the folder has no metrics, or a damaged file; the error names it.
    """
    # Figures need matplotlib, which is imported only when a report is written.
    from hybridrl.observe import figures

    history = load_history(folder)
    panels = figures.panels(history)
    with replacing(history.folder / PICTURE) as temporary:
        figures.write_png(history, temporary, panels)
    charts = [figures.panel_chart(history, panel) for panel in panels]
    write_rollouts(history)
    path = history.folder / REPORT
    with replacing(path) as temporary:
        temporary.write_text(_page(history, charts), encoding="utf-8")
    return path


def _page(history: RunHistory, charts: Sequence["Chart"]) -> str:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(Path(__file__).with_name(_TEMPLATE).read_text(encoding="utf-8"))
    starts = sessions(history.events)
    return template.render(
        title=history.title,
        folder=history.folder.resolve(),
        facts=_run_details(history, starts),
        tiles=_tiles(history),
        charts=charts,
        lines=json.dumps(
            [{"box": chart.box, "x": chart.x_range, "lines": chart.lines} for chart in charts], separators=(",", ":")
        ).replace("<", "\\u003c"),
        starts=[_start(history, start, last=start is starts[-1]) for start in starts],
        notices=[event for event in history.events if event["kind"] not in (START, RESUME, END)],
        advice=_advice(history),
        predicted=_predicted(history),
        pictures=_pictures(history),
        settings=differences(history.config),
        earlier=_earlier(history),
        shown=_setting,
        rollouts=ROLLOUTS if (history.folder / ROLLOUTS).exists() else None,
        samples={heading: examples for heading, kind in _KINDS if (examples := samples(history, kind))},
        metrics=[_metric(history, name) for name in sorted(history.curves)],
        texts={"All settings (config.yaml)": history.config_text, "Versions (versions.json)": _versions(history)},
        clip=_clip,
        score=_score,
    )


def _advice(history: RunHistory) -> Advice | None:
    return advise(history.steps(), read_timeline(history.folder), history.config)


def _predicted(history: RunHistory) -> list[tuple[str, float, float]]:
    """Return the phases of a run with measured and predicted seconds; nothing where there is no prediction."""
    package, _, name = PREDICTION.partition(":")
    on_device = (history.versions.get("device") or {}).get("names")
    if not on_device or importlib.util.find_spec(package.rpartition(".")[0]) is None:
        return []
    rows: list[tuple[str, float, float]] = getattr(importlib.import_module(package), name)(history.folder)
    return rows


def _pictures(history: RunHistory) -> list[TimelinePicture]:
    """Return the timelines of the last step and of the slowest step after the first."""
    timeline = {step: spans for step, spans in read_timeline(history.folder).items() if spans}
    if not timeline:
        return []
    seconds = {step: sum(span.seconds for span in spans if span.name == "step") for step, spans in timeline.items()}
    later = [step for step in seconds if step > min(seconds)] or list(seconds)
    slowest = max(later, key=lambda step: seconds[step])
    return [picture(step, timeline[step]) for step in dict.fromkeys((slowest, max(timeline)))]


def _run_details(history: RunHistory, starts: Sequence[RunStart]) -> list[tuple[str, str]]:
    """Return what made the run: command, machine, versions, dates."""
    versions = history.versions
    command = starts[-1].start.get("command") if starts else versions.get("command")
    device = versions.get("device") or {}
    names = ", ".join(dict.fromkeys(device.get("names") or ()))
    machine = [versions.get("host"), f"{device.get('count', '')} x {names}" if names else None]
    machine += [f"{versions['cpus']} CPU cores" if "cpus" in versions else None, versions.get("platform")]
    code = [f"hybridrl {versions['hybridrl']}" if "hybridrl" in versions else None]
    code += [f"commit {versions['git_commit'][:12]}" if versions.get("git_commit") else None]
    code += [f"Python {versions['python']}" if "python" in versions else None]
    rows = {
        "Command": shlex.join(map(str, command)) if isinstance(command, list) else "",
        "Started": starts[0].start["time"] if starts else str(versions.get("started", "")),
        "Wall time": show_seconds(sum(_seconds(history, start, start is starts[-1]) for start in starts))
        if starts
        else "",
        "Machine": ", ".join(str(part) for part in machine if part),
        "Code": ", ".join(str(part) for part in code if part),
    }
    return [(name, value) for name, value in rows.items() if value]


def _seconds(history: RunHistory, start: RunStart, last: bool) -> float:
    """Return the wall time of one start. One that goes on, or was killed, is counted to the last metrics."""
    return start.seconds((history.folder / METRICS).stat().st_mtime if last else None)


def _start(history: RunHistory, start: RunStart, last: bool) -> dict[str, Any]:
    """Return a row of the table of starts."""
    if start.end is not None:
        ended = start.end["text"]
    else:
        ended = "in progress, or killed" if last else "killed"
    return {
        "time": start.start["time"],
        "host": start.start.get("host", ""),
        "command": shlex.join(map(str, start.start.get("command", []))),
        "steps": f"{start.first_step} → {history.last_step if last else start.last_step}",
        "ended": ended,
        "seconds": show_seconds(_seconds(history, start, last)),
    }


def _setting(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if value is None or not isinstance(value, str) else value


def _earlier(history: RunHistory) -> list[tuple[str, str, int]]:
    """Return each setting that was changed during the run, with its value before and the last step that it held for."""
    return [
        (key, _setting(change["was"]), entry["after_step"])
        for entry in history.changes
        for key, change in entry["changes"].items()
    ]


def _versions(history: RunHistory) -> str:
    return json.dumps(history.versions, indent=1, ensure_ascii=False) if history.versions else ""


def _tiles(history: RunHistory) -> list[tuple[str, str]]:
    tiles = [(f"{history.last_step:,}", "steps")]
    named = [(history.reward(), ""), *((name, "validation ") for name in history.validation()[:2])]
    for name, kind in named:
        curve = history.curve(name) if name else None
        if name and curve is not None:
            label = kind + name.removeprefix("val-core/").removeprefix("critic/")
            top = best(name, curve)
            suffix = f", best {show_number(top[0])} at step {top[1]}" if top else ""
            tiles.append((f"{show_number(curve.values[0])} → {show_number(curve.values[-1])}", label + suffix))
    seconds = history.seconds()
    if seconds is not None:
        tiles.append((show_seconds(seconds), "in training steps"))
    throughput = history.curve("perf/throughput")
    if throughput is not None:
        middle = sorted(throughput.values.tolist())[len(throughput) // 2]
        tiles.append((show_number(middle), "tokens per second and device (median)"))
    return tiles


def _metric(history: RunHistory, name: str) -> dict[str, Any]:
    """Return a row of the table of all metrics."""
    everything, curve = history.curves[name], history.curve(name)
    row: dict[str, Any] = {"name": name, "broken": len(everything) - len(everything.finite)}
    if curve is None:
        return row | {"cells": ["–"] * 3, "best": None}
    low, high = show_number(curve.values.min()), show_number(curve.values.max())
    top = best(name, curve)
    row["cells"] = [show_number(curve.values[0]), show_number(curve.values[-1]), f"{low} … {high}"]
    return row | {"best": top and (show_number(top[0]), top[1])}


def _clip(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + f" … ({len(text):,} characters)"


def _score(value: Any) -> str:
    return show_number(float(value)) if isinstance(value, (int, float)) else str(value)


def summarize(folder: str | Path, *, width: int = 88, ascii_only: bool = False, color: bool = False) -> str:
    """Summarise the run in a box for the terminal: first, last and best values of key metrics, and the reward curve.

    Args:
        folder: the run's folder.
        width: width of the box, in characters.
        ascii_only: whether to use ASCII only, for terminals without Unicode.
        color: whether to use ANSI colours.

    Raises:
        UserError: see `write_report`.
    """
    history = load_history(folder)
    table = Table.grid(padding=(0, 3))
    for heading in ("", "first", "last", "best"):
        table.add_column(heading, justify="left" if not heading else "right")
    metric_names = [name for name in (history.reward(), *history.validation()[:4]) if name]
    if metric_names:
        table.add_row("", *(Text(heading, style="dim") for heading in ("first", "last", "best")))
    for name in metric_names:
        curve = history.curve(name)
        if curve is not None:
            top = best(name, curve)
            at = f"{show_number(top[0])} (step {top[1]})" if top else "-"
            table.add_row(name, show_number(curve.values[0]), show_number(curve.values[-1]), at)
    parts: list[Any] = [table, *_curve_texts(history, width, ascii_only)]
    advice = _advice(history)
    if advice is not None:
        parts.append(Text(f"speed: {advice}", overflow="fold"))
    if predicted := _predicted(history):
        phases = ", ".join(f"{phase} {seconds:.1f} ({expected:.1f})" for phase, seconds, expected in predicted)
        parts.append(Text(f"seconds measured (predicted by hybridrl plan): {phases}", overflow="fold"))
    report = history.folder / REPORT
    if report.exists():
        parts.append(Text(f"report: {report}", overflow="fold"))
    seconds = history.seconds()
    timing = f" in {show_seconds(seconds)}" if seconds is not None else ""
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        legacy_windows=False,
        safe_box=True,
    )
    console.print(
        Box(
            Group(*parts),
            title=Text(f"{history.title}: {history.last_step} steps{timing}", style="bold"),
            title_align="left",
            box=box.ASCII if ascii_only else box.ROUNDED,
            padding=(1, 2),
        )
    )
    return buffer.getvalue()


def _curve_texts(history: RunHistory, width: int, ascii_only: bool) -> list[Text]:
    name = history.reward()
    curve = history.curve(name) if name else None
    if name is None or curve is None or len(curve) < 2:
        return []
    picture = textplot.draw(curve.steps, curve.values, max(20, width - 20), 8, ascii_only=ascii_only)
    return [Text(f"\n{name} by step"), Text(picture + "\n", style="cyan", no_wrap=True)]


def print_summary(folder: str | Path) -> None:
    """Print `summarize` in the form that this terminal supports."""
    stream = sys.stdout
    unicode = (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "").startswith("utf")
    text = summarize(folder, ascii_only=not unicode, color=stream.isatty())
    write_out(lambda: print(text, end="", flush=True))


def main(arguments: Sequence[str] | None = None, command: str = "python -m hybridrl.observe.report") -> int:
    """Run the command line, called `command` in its help. Return 0, or 2 with one message if the folder is bad."""
    parser = argparse.ArgumentParser(prog=command, description="Write a run's report.")
    parser.add_argument("folder", type=Path, help="the run's folder (trainer.default_local_dir)")
    options = parser.parse_args(arguments)
    try:
        write_report(options.folder)
        print_summary(options.folder)
    except UserError as exc:
        print(exc, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
