"""A run on one page: `report.html` (stands alone, no network), `report.png`, and a summary for the terminal.

`python -m hybridrl.observe.report FOLDER` writes all three for a run, also one that still goes on.
"""

import argparse
import html
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

_STYLE = """
:root { --ink:#1f2933; --muted:#616e7c; --line:#e4e7eb; --soft:#f5f7fa; --good:#047857; --accent:#2563eb }
* { box-sizing:border-box }
body { margin:0 auto; max-width:1280px; padding:32px 24px 64px; color:var(--ink); background:#fff;
       font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
h1 { font-size:26px; margin:0 0 4px } h2 { font-size:18px; margin:40px 0 12px }
p.sub { color:var(--muted); margin:0 0 24px }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(190px,1fr)); gap:12px }
.tile { border:1px solid var(--line); border-radius:10px; padding:14px 16px }
.tile b { display:block; font-size:22px; font-weight:650; font-variant-numeric:tabular-nums }
.tile span { color:var(--muted); font-size:13px; overflow-wrap:anywhere }
.charts { display:grid; grid-template-columns:repeat(auto-fit,minmax(360px,1fr)); gap:12px }
.charts figure { margin:0; border:1px solid var(--line); border-radius:10px; padding:8px }
.charts svg { width:100%; height:auto; display:block }
.charts svg text { font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif !important }
.scroll { overflow-x:auto }
table { border-collapse:collapse; width:100%; font-size:14px }
th { text-align:left; color:var(--muted); font-weight:500; border-bottom:2px solid var(--line); padding:6px 10px }
td { border-bottom:1px solid var(--line); padding:6px 10px; vertical-align:top }
td.n, th.n { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap }
td.n small { color:var(--muted) }
code { font:13px ui-monospace,Menlo,Consolas,monospace }
.pair { display:grid; grid-template-columns:repeat(auto-fit,minmax(420px,1fr)); gap:16px }
.sample { border:1px solid var(--line); border-radius:10px; margin:0 0 10px; overflow:hidden }
.sample header { background:var(--soft); padding:6px 12px; font-size:13px; color:var(--muted) }
.sample header b { color:var(--ink) }
.sample pre { margin:0; padding:8px 12px; white-space:pre-wrap; overflow-wrap:anywhere; max-height:320px;
              overflow-y:auto; font:13px/1.45 ui-monospace,Menlo,Consolas,monospace }
.sample pre.in { color:var(--muted); border-bottom:1px dashed var(--line) }
h3 { font-size:14px; margin:8px 0; color:var(--muted); font-weight:600 }
details { border:1px solid var(--line); border-radius:10px; padding:10px 16px; margin:10px 0 }
summary { cursor:pointer; font-weight:600 } details pre { overflow-x:auto; font-size:13px }
"""


def write_report(folder: str | Path) -> Path:
    """Write `report.html` and `report.png` into a run's folder.

    Both are written with what is there: metrics that are missing have no chart, values that are not finite leave a gap.

    Returns:
        Path of `report.html`.

    Raises:
        UserError: the folder has no metrics, or a damaged file; it is named.
    """
    # Pictures cost an import of matplotlib: only who writes a report pays for it.
    from hybridrl.observe import figures

    history = load_history(folder)
    chosen = figures.panels(history)
    with replacing(history.folder / PICTURE) as beside:
        figures.write_png(history, beside, chosen)
    charts = [figures.panel_svg(history, panel, i) for i, panel in enumerate(chosen)]
    path = history.folder / REPORT
    with replacing(path) as beside:
        beside.write_text(_page(history, charts), encoding="utf-8")
    return path


def _page(history: RunHistory, charts: Sequence[str]) -> str:
    title = html.escape(history.title)
    parts = [
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{title}</title>",
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
        f"<p class=sub>{html.escape(str(history.folder.resolve()))}</p>",
        '<div class="tiles">' + "".join(_tile(*tile) for tile in _tiles(history)) + "</div>",
        '<h2>Curves</h2><div class="charts">' + "".join(f"<figure>{svg}</figure>" for svg in charts) + "</div>"
        if charts
        else "<p>No metrics yet.</p>",
        _samples_section(history, "validation", "Validation samples, first and last"),
        _samples_section(history, "rollouts", "Training samples, first and last"),
        _metrics_section(history),
        _details("Settings (config.yaml)", history.config_text),
        _details("Versions (versions.json)", history.versions_text),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _tile(value: str, label: str) -> str:
    return f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>'


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
        tiles.append((show_number(middle), "tokens a second and device (median)"))
    return tiles


def _metrics_section(history: RunHistory) -> str:
    rows = []
    for name in sorted(history.curves):
        everything, curve = history.curves[name], history.curve(name)
        broken = len(everything) - len(everything.finite)
        note = f" <small>({broken} not finite)</small>" if broken else ""
        cells = ["–", "–", "–", "–"]
        if curve is not None:
            low, high = show_number(curve.values.min()), show_number(curve.values.max())
            top = best(name, curve)
            cells = [show_number(curve.values[0]), show_number(curve.values[-1]), f"{low} … {high}"]
            cells.append(f"{show_number(top[0])} <small>step {top[1]}</small>" if top else "–")
        rows.append(
            f"<tr><td><code>{html.escape(name)}</code>{note}</td>"
            + "".join(f'<td class="n">{c}</td>' for c in cells)
            + "</tr>"
        )
    if not rows:
        return ""
    head = (
        "<tr><th>metric</th>" + "".join(f'<th class="n">{h}</th>' for h in ("first", "last", "range", "best")) + "</tr>"
    )
    table = f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'
    return f"<details><summary>All {len(rows)} metrics: first, last, range, best</summary>{table}</details>"


def _samples_section(history: RunHistory, kind: str, title: str) -> str:
    dumps = first_and_last_samples(history, kind, _SAMPLES)
    if not any(rows for _, rows in dumps):
        return ""
    columns = [f"<div><h3>step {step}</h3>" + "".join(_sample(row) for row in rows) + "</div>" for step, rows in dumps]
    return f'<h2>{html.escape(title)}</h2><div class="pair">{"".join(columns)}</div>'


def _clip(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return html.escape(text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + f" … ({len(text):,} characters)")


def _sample(row: dict[str, Any]) -> str:
    score = row.get("score")
    shown = show_number(float(score)) if isinstance(score, (int, float)) else str(score)
    truth = f" · expected <b>{_clip(row['gts'])}</b>" if row.get("gts") not in (None, "") else ""
    return (
        f'<div class="sample"><header>score <b>{html.escape(shown)}</b>{truth}</header>'
        f'<pre class="in">{_clip(row.get("input"))}</pre><pre>{_clip(row.get("output"))}</pre></div>'
    )


def _details(title: str, text: str) -> str:
    if not text:
        return ""
    return f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"


def summarize(folder: str | Path, *, width: int = 88, ascii_only: bool = False, color: bool = False) -> str:
    """The run in a box for the terminal: first, last and best of what matters, and the reward curve.

    Args:
        folder: the run's folder.
        width: of the box, in characters.
        ascii_only: for terminals that cannot show more.
        color: with ANSI colours.

    Raises:
        UserError: as `write_report`.
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
    """Print `summarize` as this terminal can show it."""
    stream = sys.stdout
    unicode = (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "").startswith("utf")
    print(summarize(folder, ascii_only=not unicode, color=stream.isatty()), end="", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 0, or 2 with one message where the folder is at fault."""
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
