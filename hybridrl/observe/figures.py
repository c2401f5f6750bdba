"""The curves of a run as figures. This is the only module that imports matplotlib."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hybridrl.config.roles import ROLES
from hybridrl.observe.run_history import Curve, RunHistory

_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#db2777", "#0891b2", "#ca8a04", "#64748b")
# Any, because matplotlib types the keys as one literal of all its settings.
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlecolor": _INK,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.labelcolor": _INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "hybridrl",  # the same bytes in every run
}
# Times of a step that are no phase of it.
_NO_PHASES = ("step", "workers", "testing", "save_checkpoint")
_MARKED_UP_TO, _SMOOTH_FROM = 12, 25
_POINTS = 2000  # of a line, whose values the page can show


@dataclass(frozen=True)
class Panel:
    """One chart: `lines` are (metric, label).

    `kind` is `noisy` (thin, with a smoothed line over it), `exact` (as is), `points` (few values, marked) or `stack`.
    Other metrics whose names end in `/<every>` follow the lines, and their labels are what precedes it.
    """

    title: str
    lines: tuple[tuple[str, str], ...]
    kind: str = "noisy"
    every: str = ""


_PANELS = (
    Panel("Reward (mean score of a response)", (("critic/score/mean", "score"), ("critic/rewards/mean", "with KL"))),
    Panel("Training loss", (("train/loss", "training"), ("val/loss", "validation"))),
    Panel("Pairs whose chosen answer is preferred", (("train/accuracy", "training"), ("val/accuracy", "validation"))),
    Panel("Margin of rewards in a pair", (("train/margin", "training"), ("val/margin", "validation"))),
    Panel("Response length (tokens)", (("response_length/mean", "mean"), ("response_length/max", "longest"))),
    Panel("Entropy of the policy (nats per token)", (("actor/entropy", "entropy"),)),
    Panel(
        "KL divergence (nats per token)",
        (("actor/ppo_kl", "from old policy"), ("actor/kl_loss", "loss term"), ("actor/reward_kl_penalty", "in reward")),
    ),
    Panel(
        "Gradient norm",
        (("actor/grad_norm", "actor"), ("critic/grad_norm", "critic"), ("train/grad_norm", "model")),
        every="grad_norm",
    ),
    Panel("Policy loss", (("actor/pg_loss", "loss"),)),
    Panel("Clipped share of tokens", (("actor/pg_clipfrac", "ratio"), ("actor/pg_clipfrac_lower", "dual clip"))),
    Panel("Value loss", (("critic/vf_loss", "loss"),)),
    Panel("Variance that the critic explains", (("critic/vf_explained_var", "explained"),)),
    Panel("Learning rate", (("actor/lr", "actor"), ("critic/lr", "critic"), ("train/lr", "model")), "exact", "lr"),
    Panel("Rollout against trainer (probability of a token)", (("training/rollout_probs_diff_mean", "difference"),)),
    Panel("Throughput (tokens per second and device)", (("perf/throughput", "tokens"),)),
)


def panels(history: RunHistory) -> list[Panel]:
    """Return the charts that this run has data for, the most informative first."""
    run_panels = []
    for panel in _PANELS:
        lines = tuple((name, label) for name, label in _lines_of(panel, history) if _is_informative(history, name))
        if lines:  # roles that learn alike are different lines
            repeated = not panel.every and _repeats(history, lines)
            run_panels.append(Panel(panel.title, lines[:1] if repeated else lines, panel.kind))
    parts = [name for name in history.curves if name.startswith("reward/") and name.endswith("/mean")]
    lines = tuple((name, name.removeprefix("reward/").removesuffix("/mean")) for name in parts[: len(_COLOURS)])
    if {name for _, name in lines} - {"acc", "score"}:  # which the first panel shows
        run_panels.insert(min(1, len(run_panels)), Panel("What the reward function returned (mean)", lines))
    names = history.validation()[: len(_COLOURS)]
    if names:
        lines = tuple((name, name.removeprefix("val-core/")) for name in names)
        run_panels.insert(min(1, len(run_panels)), Panel("Validation", lines, "points"))
    phases = tuple((f"timing_s/{name}", name) for name in _phases(history))
    if len(phases) > 1:
        run_panels.append(Panel("Seconds per step, by phase", phases, "stack"))
    elif history.curve("timing_s/step"):
        run_panels.append(Panel("Seconds per step", (("timing_s/step", "step"),)))
    return run_panels


def _lines_of(panel: Panel, history: RunHistory) -> list[tuple[str, str]]:
    """The lines of a panel in this run, with those of roles that the library does not know."""
    end, labels = f"/{panel.every}", dict(panel.lines)
    others = [name for name in history.curves if name.endswith(end) and name not in labels] if panel.every else []
    return [*panel.lines, *((name, name.removesuffix(end)) for name in others)]


def _phases(history: RunHistory) -> list[str]:
    """The phases of a step that were measured, in about their order. Unknown ones come before the last."""
    specs = list(ROLES.values())
    before = ("data", "gen", "gen_max", "reward", *(spec.scoring.phase for spec in specs if spec.scoring is not None))
    passes = (*(scoring_pass.phase for spec in specs for scoring_pass in spec.passes), "rollout_corr", "adv")
    updates = [spec.update.phase for spec in reversed(specs) if spec.update is not None]
    phases = [name.removeprefix("timing_s/") for name in history.curves if name.startswith("timing_s/")]
    others = [name for name in phases if "/" not in name and name not in _NO_PHASES and name != "update_weights"]
    order = dict.fromkeys((*before, *passes, *updates, *others, "update_weights"))
    return [name for name in order if name in phases]


def _is_informative(history: RunHistory, name: str) -> bool:
    """Return whether a metric has points other than zeros. With one update per batch nothing is clipped."""
    curve = history.curve(name)
    return curve is not None and (name == history.reward() or bool(np.any(curve.values)))


def _repeats(history: RunHistory, lines: tuple[tuple[str, str], ...]) -> bool:
    """Return whether a panel's second line repeats its first (rewards without a KL penalty are the scores)."""
    if len(lines) != 2:
        return False
    first, second = history.curve(lines[0][0]), history.curve(lines[1][0])
    return first is not None and second is not None and np.array_equal(first.values, second.values)


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Average the neighbours of each point, weighted by a triangle that is `span` points wide on either side.

    Unlike a moving average of past points it does not lag. At the ends it averages the existing points.
    """
    kernel = np.bartlett(2 * span + 1)
    total = np.convolve(values, kernel, mode="full")[span:-span]
    weight = np.convolve(np.ones(len(values)), kernel, mode="full")[span:-span]
    return total / weight


def _draw(axes: Any, history: RunHistory, panel: Panel) -> None:
    if panel.kind == "stack":
        _draw_stack(axes, history, panel)
    else:
        for i, (name, label) in enumerate(panel.lines):
            curve = history.curve(name)
            if curve is not None:
                _draw_line(axes, curve, label, _COLOURS[i % len(_COLOURS)], panel.kind)
    axes.set_title(panel.title)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}")
    )
    if panel.kind == "stack":
        axes.legend(loc="upper left", ncols=4, handlelength=0.9, columnspacing=1.0, labelspacing=0.3)
    elif len(panel.lines) > 1:
        axes.legend(loc="best", ncols=2 if len(panel.lines) > 4 else 1, handlelength=1.2, labelspacing=0.3)


def _draw_line(axes: Any, curve: Curve, label: str, colour: str, kind: str) -> None:
    if kind == "points" or len(curve) <= _MARKED_UP_TO:
        axes.plot(curve.steps, curve.values, color=colour, lw=1.8, marker="o", ms=4, mec="white", mew=0.8, label=label)
    elif kind == "exact" or len(curve) < _SMOOTH_FROM:
        axes.plot(curve.steps, curve.values, color=colour, lw=1.6, label=label)
    else:
        axes.plot(curve.steps, curve.values, color=colour, lw=0.7, alpha=0.3)
        smoothed = smooth(curve.values, max(3, len(curve) // 15))
        axes.plot(curve.steps, smoothed, color=colour, lw=1.9, label=label)


def _draw_stack(axes: Any, history: RunHistory, panel: Panel) -> None:
    """Draw the phases stacked, over the steps in which any of them was measured."""
    measured = {label: history.curve(name) for name, label in panel.lines}
    steps = sorted({int(step) for curve in measured.values() if curve for step in curve.steps})
    rows = []
    for curve in measured.values():
        by_step = dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)) if curve else {}
        rows.append([by_step.get(step, 0.0) for step in steps])
    colours = [_COLOURS[i % len(_COLOURS)] for i in range(len(rows))]
    if len(steps) == 1:
        steps, rows = [steps[0], steps[0] + 1], [[row[0]] * 2 for row in rows]
    axes.stackplot(steps, rows, labels=list(measured), colors=colours, alpha=0.85, lw=0)
    # One slow step (the first, a validation) must not flatten all the others.
    totals = np.asarray(rows).sum(axis=0)
    rows_of_legend = -(-len(rows) // 4)
    axes.set_ylim(0, min(totals.max(), 2.0 * np.median(totals)) * (1.1 + 0.1 * rows_of_legend) or 1.0)


@dataclass(frozen=True)
class Chart:
    """A drawn panel, and what a page needs to show values under the mouse.

    Attributes:
        title: the panel's.
        svg: the picture, in base64 for a data URI.
        box: left, top, width and height of the plot, as fractions of the picture.
        x_range: the steps at its left and right edge.
        lines: `{"label", "steps", "values"}` of each line; long ones are thinned out.
    """

    title: str
    svg: str
    box: tuple[float, float, float, float]
    x_range: tuple[float, float]
    lines: list[dict[str, Any]]


def panel_chart(history: RunHistory, panel: Panel) -> Chart:
    """Draw one chart as SVG."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.2, 2.9), layout="constrained")
        axes = figure.subplots()
        _draw(axes, history, panel)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
        place = axes.get_position()  # final once the figure is drawn
    lines = []
    for name, label in panel.lines:
        curve = history.curve(name)
        if curve is not None:
            indices = np.unique(np.linspace(0, len(curve) - 1, min(len(curve), _POINTS)).round().astype(int))
            values = [float(f"{value:.6g}") for value in curve.values[indices]]
            lines.append({"label": label, "steps": curve.steps[indices].tolist(), "values": values})
    return Chart(
        panel.title,
        base64.b64encode(buffer.getvalue()).decode("ascii"),
        tuple(round(float(side), 5) for side in (place.x0, 1 - place.y1, place.width, place.height)),  # type: ignore[arg-type]
        (float(axes.get_xlim()[0]), float(axes.get_xlim()[1])),
        lines,
    )


def write_png(history: RunHistory, path: Path, selected_panels: Sequence[Panel] | None = None) -> None:
    """Write all charts into one image, three per row."""
    selected_panels = panels(history) if selected_panels is None else selected_panels
    columns = min(3, max(1, len(selected_panels)))
    rows = max(1, -(-len(selected_panels) // columns))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.0 * columns, 2.9 * rows + 0.55), layout="constrained", facecolor="white")
        layout: Any = figure.get_layout_engine()
        layout.set(w_pad=0.12, h_pad=0.12)
        figure.suptitle(history.title, x=0.01, ha="left", fontsize=14, fontweight="bold", color=_INK)
        note = "by training step; thin: one step, bold: smoothed"
        figure.text(0.99, 0.995, note, ha="right", va="top", color=_MUTED, fontsize=9)
        grid = figure.subplots(rows, columns, squeeze=False)
        for i, axes in enumerate(grid.flat):
            if i < len(selected_panels):
                _draw(axes, history, selected_panels[i])
            else:
                axes.set_axis_off()
        if not selected_panels:
            grid[0, 0].text(0.5, 0.5, "no metrics yet", ha="center", color=_MUTED, transform=grid[0, 0].transAxes)
        figure.savefig(path, format="png", dpi=110)
