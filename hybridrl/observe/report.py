"""A run on one page: `report.html` (self-contained, no network), `report.png`, and a summary for the terminal.

`python -m hybridrl.observe.report FOLDER` writes all three for a run, even while it is in progress.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.panel import Panel as Box
from rich.table import Table
from rich.text import Text

from hybridrl.errors import UserError
from hybridrl.observe import textplot
from hybridrl.observe.history import (
    RunHistory,
    best,
    first_and_last_samples,
    load_history,
    show_number,
    show_seconds,
)
from hybridrl.utils.files import replacing

REPORT, PICTURE = "report.html", "report.png"
_SAMPLES = 4
_MAX_TEXT = 4000

_TEMPLATE = "report.html.jinja"


def write_report(folder: str | Path) -> Path:
    """Write `report.html` and `report.png` into a run's folder.

    Both use the data that exists. Missing metrics have no chart, and values that are not finite leave a gap.

    Returns:
        Path of `report.html`.

    Raises:
        UserError: the folder has no metrics, or a damaged file; the error names it.
    """
    # Figures need matplotlib, which is imported only when a report is written.
    from hybridrl.observe import figures

    history = load_history(folder)
    chosen = figures.panels(history)
    with replacing(history.folder / PICTURE) as temporary:
        figures.write_png(history, temporary, chosen)
    charts = [(panel.title, figures.panel_svg(history, panel)) for panel in chosen]
    path = history.folder / REPORT
    with replacing(path) as temporary:
        temporary.write_text(_page(history, charts), encoding="utf-8")
    return path


def _page(history: RunHistory, charts: Sequence[tuple[str, str]]) -> str:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(Path(__file__).with_name(_TEMPLATE).read_text(encoding="utf-8"))
    samples = {
        title: first_and_last_samples(history, kind, _SAMPLES)
        for title, kind in (("Validation samples", "validation"), ("Training samples", "rollouts"))
    }
    texts = {"Settings (config.yaml)": history.config_text, "Versions (versions.json)": history.versions_text}
    return template.render(
        title=history.title,
        folder=history.folder.resolve(),
        tiles=_tiles(history),
        charts=charts,
        samples=samples,
        metrics=[_metric(history, name) for name in sorted(history.curves)],
        texts=texts,
        clip=_clip,
        score=_score,
    )


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
    shown = [name for name in (history.reward(), *history.validation()[:4]) if name]
    if shown:
        table.add_row("", *(Text(heading, style="dim") for heading in ("first", "last", "best")))
    for name in shown:
        curve = history.curve(name)
        if curve is not None:
            top = best(name, curve)
            at = f"{show_number(top[0])} (step {top[1]})" if top else "-"
            table.add_row(name, show_number(curve.values[0]), show_number(curve.values[-1]), at)
    parts: list[Any] = [table, *_curve_texts(history, width, ascii_only)]
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
    print(summarize(folder, ascii_only=not unicode, color=stream.isatty()), end="", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0, or 2 with one message if the folder is at fault."""
    parser = argparse.ArgumentParser(prog="python -m hybridrl.observe.report", description="Write a run's report.")
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
