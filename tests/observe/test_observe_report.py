"""The report of runs of every size: none breaks it, and what it says is what was logged."""

import base64
import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from raising import raises_with

from hybridrl.config.roles import ROLES, Pass, Scoring
from hybridrl.errors import UserError
from hybridrl.observe import textplot
from hybridrl.observe.dump import dump_generations
from hybridrl.observe.figures import panels
from hybridrl.observe.report import main, summarize, write_report
from hybridrl.observe.run_folder import write_run_info
from hybridrl.observe.run_history import Curve, RunHistory, best, load_history, show_number, show_seconds
from hybridrl.observe.tracking import Tracking


def make_run(folder: Path, steps: int, **changes: float) -> Path:
    with Tracking([], "p", "e", folder) as tracking:
        for step in range(1, steps + 1):
            metrics = {"critic/score/mean": step / (steps + 1), "actor/entropy": 1 / step, "timing_s/step": 0.5}
            metrics |= {"timing_s/gen": 0.2, "timing_s/update_actor": 0.3, "actor/lr": 1e-3}
            if step % 5 == 0 or step == 1:
                metrics["val-core/sort/acc/mean@1"] = step / 100
            tracking.log(metrics | changes, step)
    return folder


class Balance(HTMLParser):
    """Collects tags that are closed without being open, and those left open."""

    VOID = ("meta", "br", "img", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.wrong.append(tag)


def check_page(page: str) -> None:
    page = page.replace('<a href="rollouts.html">', "<a>", 1)  # a link to the page next to it fetches nothing
    parser = Balance()
    parser.feed(page)
    assert parser.wrong == []
    assert parser.open == []
    # Stands alone: nothing is fetched (addresses in it are names of XML dialects and metadata only).
    assert not re.search(r"<(link|iframe)\b|<script\s|url\((?!#)|@import|(href|src)=\"(?!#|data:)", page)
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|WebSocket|sendBeacon", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("steps", [1, 2, 60])
def test_report_of_runs_of_any_length(tmp_path: Path, steps: int) -> None:
    page = write_report(make_run(tmp_path, steps)).read_text()
    check_page(page)
    titles = re.findall(r'<img alt="([^"]+)"', page)
    assert [re.match(r"\w+", title).group() for title in titles] == [
        "Reward",
        "Validation",
        "Entropy",
        "Learning",
        "Seconds",
    ]
    for data in re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page):
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")
    assert f"{show_number(1 / (steps + 1))} → {show_number(steps / (steps + 1))}" in page
    picture = (tmp_path / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


def test_picture_is_not_blank(tmp_path: Path) -> None:
    from matplotlib.image import imread

    write_report(make_run(tmp_path, 30))
    pixels = imread(tmp_path / "report.png")[..., :3]
    assert pixels.shape[1] > 1000
    blue = np.abs(pixels - np.array([0x25, 0x63, 0xEB]) / 255).max(axis=2) < 0.05
    assert blue.sum() > 500, "the curves"


def test_values_that_are_not_finite_leave_a_gap_and_are_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path, 10, **{"actor/grad_norm": math.nan, "actor/pg_loss": math.inf})
    with Tracking([], "p", "e", folder) as tracking:
        tracking.log({"actor/grad_norm": 2.0, "critic/score/mean": math.nan}, 11)
    page = write_report(folder).read_text()
    check_page(page)
    assert "<code>actor/grad_norm</code> <small>(10 not finite)</small>" in page
    assert "Policy loss" not in page, "no finite point, no chart"
    assert "critic/score/mean" in summarize(folder)


def test_a_run_without_metrics_yet(tmp_path: Path) -> None:
    with Tracking([], "p", "e", tmp_path):
        pass
    page = write_report(tmp_path).read_text()
    check_page(page)
    assert "No metrics yet" in page
    assert "0 steps" in summarize(tmp_path)


def test_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with raises_with(UserError, "metrics.jsonl"):
        write_report(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err


def test_samples_settings_and_versions_are_shown_escaped(tmp_path: Path) -> None:
    folder = make_run(tmp_path, 3)
    write_run_info(folder, {"trainer": {"project_name": "<b>p</b>", "experiment_name": "e&f"}})
    for step in (1, 2, 3):
        texts = [f"<script>alert({step})</script>"]
        dump_generations(folder / "rollouts", step, texts, ["x" * 9000], [0.25], [{"a": "<i>"}])
    page = write_report(folder).read_text()
    check_page(page)
    assert "<title>&lt;b&gt;p&lt;/b&gt; / e&amp;f</title>" in page
    assert page.count("<script") == 1
    for step in (1, 2, 3):
        assert f"&lt;script&gt;alert({step})&lt;/script&gt;" in page
    assert "(9,000 characters)" in page
    assert "versions.json" in page


def test_dumps_are_found_where_the_settings_say(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 3)
    write_run_info(folder, {"trainer": {"rollout_data_dir": str(tmp_path / "elsewhere")}})
    dump_generations(tmp_path / "elsewhere", 2, ["find me"], ["out"], [1.0])
    assert "find me" in write_report(folder).read_text()


def test_best_follows_the_metrics_direction(tmp_path: Path) -> None:
    with Tracking([], "p", "e", tmp_path) as tracking:
        for step, value in ((1, 0.3), (2, 0.9), (3, 0.1)):
            tracking.log({"val-core/a/acc/mean@1": value, "train/loss": value, "actor/entropy": value}, step)
    curves = load_history(tmp_path).curves
    assert best("val-core/a/acc/mean@1", curves["val-core/a/acc/mean@1"]) == (0.9, 2)
    assert best("train/loss", curves["train/loss"]) == (0.1, 3)
    assert best("actor/entropy", curves["actor/entropy"]) is None


def test_lines_of_one_step_are_put_together(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":2,"a":5}\n{"step":1,"a":1}\n{"step":1,"b":2,"a":3}\n{"step":3,"a')
    history = load_history(tmp_path)
    assert history.curves["a"].steps.tolist() == [1, 2]
    assert history.curves["a"].values.tolist() == [3.0, 5.0]
    assert history.last_step == 2


# ---------------------------------------------------------------- the terminal's picture


def test_summary_says_first_last_best(tmp_path: Path) -> None:
    folder = make_run(tmp_path, 30)
    write_report(folder)
    text = summarize(folder, width=90)
    assert max(map(len, text.splitlines())) <= 90
    row = next(line for line in text.splitlines() if "critic/score/mean " in line and "0.03226" in line)
    assert "0.9677 (step 30)" in row
    assert "val-core/sort/acc/mean@1" in text
    assert "30 steps in 15 s" in text
    assert "\x1b" not in text
    assert summarize(folder, ascii_only=True).isascii() or not str(folder).isascii()


def test_command_prints_on_a_stream_without_unicode(tmp_path: Path) -> None:
    import os

    command = [sys.executable, "-m", "hybridrl.observe.report", str(make_run(tmp_path, 5))]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command, capture_output=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("ascii").count("*") > 20


@pytest.mark.parametrize("ascii_only", [False, True])
def test_drawing_rises_where_the_curve_rises(ascii_only: bool) -> None:
    steps = np.arange(50)
    drawn = textplot.draw(steps, steps / 49, width=40, height=8, ascii_only=ascii_only).splitlines()
    assert len(drawn) == 10
    empty = " " if ascii_only else "\u2800"
    body = [line[-40:] for line in drawn[:8]]
    first_marks = [min(i for i, c in enumerate(row) if c != empty) for row in body]
    assert first_marks == sorted(first_marks, reverse=True)
    assert drawn[0].lstrip().startswith("1 ")
    assert drawn[-1].split() == ["0", "49"]


@pytest.mark.parametrize("values", [[], [math.nan]])
def test_drawing_of_nothing(values: list[float]) -> None:
    assert textplot.draw(np.arange(len(values)), np.array(values)) == ""


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5, 0.5], [0.0, 0.0], [1e-12, -1e-12], [math.nan, 1.0, math.inf]])
def test_drawing_of_a_flat_curve(values: list[float]) -> None:
    drawn = textplot.draw(np.arange(len(values)), np.array(values), width=30, height=8)
    assert len(drawn.splitlines()) == 10


def test_numbers_for_people() -> None:
    shown = [show_number(v) for v in (0.123456, 1234.5, 3.0, 12345678.9, math.nan, 1.5e-7)]
    assert shown == ["0.1235", "1,234", "3", "12,345,679", "nan", "1.5e-07"]
    assert [show_seconds(s) for s in (1.25, 42, 200, 18720)] == ["1.2 s", "42 s", "3 min 20 s", "5 h 12 min"]


def test_charts_that_would_tell_nothing_are_left_out(tmp_path: Path) -> None:
    always_zero = {"actor/pg_clipfrac": 0.0, "actor/ppo_kl": 0.0}
    page = write_report(make_run(tmp_path / "a", 5, **always_zero, **{"critic/score/mean": 0.0})).read_text()
    assert "Clipped share" not in page
    assert "KL divergence" not in page
    assert "Reward (mean score" in page, "a reward that stays at zero is worth seeing"
    assert "KL divergence" in write_report(make_run(tmp_path / "b", 5, **{"actor/ppo_kl": 1e-9})).read_text()


def test_gradient_norms_and_learning_rates_of_all_roles_are_drawn(tmp_path: Path) -> None:
    """Those of other roles than actor and critic come after them, under the names that their workers give them."""
    points = Curve(np.array([1, 2]), np.array([0.25, 0.5]))
    names = [f"{role}/{name}" for name in ("grad_norm", "lr") for role in ("own", "prime", "critic", "actor")]
    curves = {name: replace(points, values=points.values + row) for row, name in enumerate(names)}
    found = {panel.title: panel for panel in panels(RunHistory(tmp_path, {**curves, "x/grad": points}, last_step=2))}
    for title, name in (("Gradient norm", "grad_norm"), ("Learning rate", "lr")):
        roles = ["actor", "critic", "own", "prime"]
        assert found[title].lines == tuple((f"{role}/{name}", role) for role in roles)
    alike = panels(RunHistory(tmp_path, {"actor/lr": points, "prime/lr": points}, last_step=2))
    assert [(panel.title, panel.kind, panel.lines) for panel in alike] == [
        ("Learning rate", "exact", (("actor/lr", "actor"), ("prime/lr", "prime")))
    ]


def test_phases_of_roles_that_the_user_registered_are_drawn(tmp_path: Path, monkeypatch) -> None:
    """In their order where the table has the role, as in the run itself, and otherwise too."""
    scoring = Scoring("own_scores", "score", "own", reader=lambda: None, weight=lambda config: 1.0)
    own = replace(ROLES["ref"], name="own", scoring=scoring, passes=(Pass("own_pass", "compute"),))
    monkeypatch.setitem(ROLES, "own", own)
    points = Curve(np.arange(3), np.ones(3))
    names = (
        *("timing_s/step", "timing_s/workers", "timing_s/testing", "timing_s/reward_sample/mean"),
        *("timing_s/update_weights", "timing_s/update_actor", "timing_s/update_critic", "timing_s/values"),
        *("timing_s/own_scores", "timing_s/own_pass", "timing_s/reward", "timing_s/gen", "timing_s/elsewhere"),
    )
    found = panels(RunHistory(tmp_path, dict.fromkeys(names, points), last_step=2))
    (phases,) = [panel for panel in found if panel.kind == "stack"]
    drawn = [label for _, label in phases.lines]
    assert drawn[:4] == ["gen", "reward", "own_scores", "values"] and drawn[4] == "own_pass"
    assert drawn[5:] == ["update_critic", "update_actor", "elsewhere", "update_weights"]
