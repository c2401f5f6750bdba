"""What a run tells besides its metrics, and the report that shows it."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import time
from base64 import b64decode
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from raising import raises_with

from hybridrl.config import load_config
from hybridrl.config.differences import differences
from hybridrl.errors import UserError
from hybridrl.notify import listening, notify
from hybridrl.observe.dump import dump_generations
from hybridrl.observe.events import END, RESUME, EventLog, beginning, read_events, sessions
from hybridrl.observe.figures import panel_chart, panels
from hybridrl.observe.report import write_report
from hybridrl.observe.report_samples import choose, samples, spread
from hybridrl.observe.run_folder import as_dict, write_run_info
from hybridrl.observe.run_history import load_history
from hybridrl.observe.tracking import Tracking

WORDS = ["data.train_files=a.parquet", "actor_rollout_ref.model.path='<m>'", "algorithm.adv_estimator=grpo"]


def start(folder: Path, steps: range, end: str | None = None, resumed: bool = False) -> None:
    """One start of a run, as `TrainingRun` records it."""
    step = steps.start
    with Tracking([], "p", "e", folder) as tracking, EventLog(folder, lambda: step) as events:
        if resumed:
            events.write(RESUME, "checkpoint")
        for step in steps[1:]:
            tracking.log({"critic/score/mean": step / 10, "actor/ppo_kl": 1e-4 * step}, step)
            if step == 3:
                notify("entropy is <low>", "warning")
        if end is not None:
            events.write(END, end)


def test_wall_time_counts_what_comes_before_the_folder(tmp_path: Path) -> None:
    """Processes start and models load before a run has its folder; a later start in the same process has its own."""
    with beginning():
        began = datetime.datetime.now(datetime.UTC)
        time.sleep(1.1)  # times are written in whole seconds
        start(tmp_path, range(0, 3), "finished")
    start(tmp_path, range(2, 4), "finished", resumed=True)
    first, second = (datetime.datetime.fromisoformat(one.start["time"]) for one in sessions(read_events(tmp_path)))
    assert first <= began < second


def test_the_report_shows_the_settings_of_the_last_start(tmp_path: Path) -> None:
    """`config.yaml` has those of the first; what changed since is next to it."""
    config = load_config(
        "ppo_trainer", [*WORDS, "actor_rollout_ref.actor.optim.lr=1e-5", "actor_rollout_ref.rollout.n=4"]
    )
    write_run_info(tmp_path, config)
    start(tmp_path, range(0, 6), "finished")
    entries = [
        {"after_step": 4, "changes": {"actor_rollout_ref.actor.optim.lr": {"was": 1e-5, "now": 2e-5}}},
        {
            "after_step": 5,
            "changes": {
                "actor_rollout_ref.actor.optim.lr": {"was": 2e-5, "now": 3e-5},
                "trainer.experiment_name": {"was": "e", "now": "renamed"},
                "content of reward.custom_reward_function.path": {"was": "0123", "now": "4567"},
            },
        },
    ]
    (tmp_path / "config_changes.yaml").write_text(yaml.safe_dump(entries))
    history = load_history(tmp_path)
    shown = {one.key: one.value for one in differences(history.config)}
    assert shown["actor_rollout_ref.actor.optim.lr"] == 3e-5 and shown["actor_rollout_ref.rollout.n"] == 4
    assert history.title.endswith("renamed")
    page = write_report(tmp_path).read_text()
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    cells = [re.findall(r"<td[^>]*>(?:<code>)?(.*?)(?:</code>)?</td>", row) for row in rows]
    lr = [row[1:] for row in cells if row[:1] == ["actor_rollout_ref.actor.optim.lr"]]
    assert lr == [["3e-05", "1e-06"], ["1e-05", "4"], ["2e-05", "5"]]
    (tmp_path / "config_changes.yaml").write_text("- after_step: many")
    with raises_with(UserError, "config_changes.yaml"):
        write_report(tmp_path)


def test_what_is_told_before_and_during_a_run_is_recorded_with_its_step(tmp_path: Path) -> None:
    with listening(lambda *_: None):
        pass  # drops what earlier tests told
    notify("5 rows have no ground truth", "warning")
    start(tmp_path, range(0, 6), "finished")
    notify("after the run")
    found = [(event["kind"], event["step"], event["text"]) for event in read_events(tmp_path)]
    assert found == [
        ("start", 0, ""),
        ("warning", 0, "5 rows have no ground truth"),
        ("warning", 3, "entropy is <low>"),
        ("end", 5, "finished"),
    ]
    start(tmp_path, range(5, 7), resumed=True)
    assert [event["text"] for event in read_events(tmp_path)][-2:] == ["after the run", "checkpoint"]


def test_an_event_that_cannot_be_written_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventLog(tmp_path, lambda: 1) as events:
        os.dup2(os.open("/dev/full", os.O_WRONLY), events._file._file.fileno())
        notify("the disk is full", "warning")
        events.write(END, "OSError")
    events.write(END, "after the file was closed")
    assert "the disk is full" in capsys.readouterr().err


def test_starts_of_a_run_and_how_they_ended(tmp_path: Path) -> None:
    start(tmp_path, range(0, 5))  # killed
    start(tmp_path, range(2, 8), "stopped (SIGINT)", resumed=True)
    start(tmp_path, range(7, 9), resumed=True)
    found = sessions(read_events(tmp_path))
    assert [(one.first_step, one.last_step) for one in found[:2]] == [(0, 3), (2, 7)]
    assert [one.end and one.end["text"] for one in found] == [None, "stopped (SIGINT)", None]
    begin = found[0].seconds()
    assert 0 <= begin <= 60 and found[2].seconds(until=2e9) > 1e8 and found[1].seconds(until=2e9) <= 60


def test_the_page_shows_starts_warnings_command_and_changed_settings(tmp_path: Path) -> None:
    write_run_info(tmp_path, load_config("ppo_trainer", WORDS))
    start(tmp_path, range(0, 5))
    start(tmp_path, range(2, 8), "stopped (SIGINT)", resumed=True)
    page = write_report(tmp_path).read_text()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    assert "0 → 3" in text and "killed" in text and "2 → 7" in text and "stopped (SIGINT)" in text
    assert "entropy is &lt;low&gt;" in page and "2 notices and warnings" in text
    assert "Command" in text and "pytest" in text and "Wall time" in text and "Machine" in text
    first = page.index("Settings that differ from the defaults")
    assert first < page.index("All settings (config.yaml)")
    table = page[first : page.index("</table>", first)]
    assert re.findall(r"<code>([^<]+)</code>", table) == [
        "actor_rollout_ref.model.path",
        "algorithm.adv_estimator",
        "data.train_files",
    ]
    assert "&lt;m&gt;" in table and "<td>gae</td>" in table


def test_a_run_of_an_earlier_version_has_a_report(tmp_path: Path) -> None:
    with Tracking([], "p", "e", tmp_path) as tracking:
        tracking.log({"critic/score/mean": 0.5}, 1)
    page = write_report(tmp_path).read_text()
    assert "Events</h2>" not in page and "Settings that differ" not in page and "Curves" in page


def test_differences_are_those_that_the_user_made() -> None:
    words = [
        *WORDS,
        "actor_rollout_ref.actor.clip_ratio=0.3",  # clip_ratio_low and clip_ratio_high follow it
        "critic.strategy=fsdp2",
        "trainer.rollout_data_dir=dumps",  # trainer.dump_freq follows it, through a function
        "trainer.n_gpus_per_node=2",  # placement.pools follows it, through a function
        "reward.custom_reward_function.reward_kwargs={x: 1}",
        "actor_rollout_ref.rollout.temperature=1.0",
    ]
    found = {one.key: (one.value, one.default) for one in differences(as_dict(load_config("ppo_trainer", words)))}
    assert found == {
        "actor_rollout_ref.model.path": ("<m>", ""),
        "actor_rollout_ref.actor.clip_ratio": (0.3, 0.2),
        "algorithm.adv_estimator": ("grpo", "gae"),
        "data.train_files": (["a.parquet"], []),
        "reward.custom_reward_function.reward_kwargs": ({"x": 1}, {}),
        "trainer.rollout_data_dir": ("dumps", None),
        "trainer.n_gpus_per_node": (2, 1),
    }
    apart = [*WORDS, "actor_rollout_ref.actor.clip_ratio=0.3", "actor_rollout_ref.actor.clip_ratio_low=0.2"]
    keys = [one.key for one in differences(as_dict(load_config("ppo_trainer", apart)))]
    assert "actor_rollout_ref.actor.clip_ratio_low" in keys and "actor_rollout_ref.actor.clip_ratio_high" not in keys
    sft = differences(as_dict(load_config("sft_trainer", ["data.train_files=a", "model.path=x", "optim.lr=1"])))
    assert [one.key for one in sft] == ["model.path", "optim.lr", "data.train_files"]


# ---------------------------------------------------------------- samples


def test_the_best_the_worst_and_several_prompts_are_shown() -> None:
    rows = [
        {"uid": f"0-{prompt}", "input": f"p{prompt}", "output": f"{prompt}.{n}", "score": (7 * prompt + n) % 11}
        for prompt in range(9)
        for n in range(3)
    ]
    found = choose(rows)
    marks = {sample.mark: sample.row["score"] for sample in found if sample.mark}
    assert marks == {"best": 10, "worst": 0}
    others = [sample.row["output"] for sample in found if not sample.mark]
    assert set(others) <= {f"{prompt}.0" for prompt in range(9)} and len({o[0] for o in others}) == len(others) >= 2
    assert [sample.row["output"] for sample in choose([{**row, "score": 1.0} for row in rows])] == [
        "0.0",
        "3.0",
        "5.0",
        "8.0",
    ]
    assert len(choose([{**row, "score": "NaN"} for row in rows])) == 4
    assert choose([]) == []


def test_samples_of_several_steps(tmp_path: Path) -> None:
    start(tmp_path, range(0, 60))
    for step in range(0, 60, 5):
        dump_generations(tmp_path / "validation", step, ["a", "b"], ["x", "y"], [0.0, step / 60], [1, 2])
    found = samples(load_history(tmp_path), "validation")
    assert [step for step, _ in found] == [0, 10, 20, 35, 45, 55]
    assert [[sample.mark for sample in rows] for _, rows in found] == [["", ""], *[["best", "worst"]] * 5]
    assert samples(load_history(tmp_path), "rollouts") == []
    page = write_report(tmp_path).read_text()
    assert page.count('class="step"') == 6 and page.count('type="search"') == 1
    assert spread([1, 2, 3], 6) == [1, 2, 3] and spread(list(range(101)), 3) == [0, 50, 100]


# ---------------------------------------------------------------- values under the mouse

MOUSE = """
const fs = require("fs"), page = fs.readFileSync(process.argv[2], "utf8");
const node = () => ({
  style: {}, children: [], textContent: "", hidden: false, clientWidth: 500, offsetLeft: 0, offsetTop: 0, handlers: {},
  appendChild(one) { this.children.push(one); return one; },
  replaceChildren(...all) { this.children = all; this.firstChild = all[0]; },
  addEventListener(name, f) { this.handlers[name] = f; },
  querySelector() { return this.image; },
  getBoundingClientRect() { return {left: 100, width: 500, height: 280}; },
});
const figures = page.match(/<figure>/g).map(() => Object.assign(node(), {image: node()}));
globalThis.document = {
  querySelectorAll: selector => selector.includes("figure") ? figures : [],
  createElement: name => Object.assign(node(), {name}),
};
eval(page.match(/<script>([\\s\\S]*)<\\/script>/)[1] + ";globalThis.charts = charts;");
const [left, , width] = charts[0].box, [low, high] = charts[0].x, tip = () => figures[0].children[1];
const text = () => tip().children.map(one => typeof one === "string" ? one : one.textContent).filter(Boolean);
const move = x => figures[0].handlers.mousemove({clientX: 100 + 500 * x});
const seen = {};
for (const step of [1, 30, 59]) { move(left + (step + 0.3 - low) / (high - low) * width); seen[step] = text(); }
move(0.001);
seen.outside = tip().hidden;
console.log(JSON.stringify(seen));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the script of the page")
def test_values_under_the_mouse(tmp_path: Path) -> None:
    start(tmp_path, range(0, 60))
    (tmp_path / "mouse.js").write_text(MOUSE)
    command = ["node", str(tmp_path / "mouse.js"), str(write_report(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "1": ["step 1", "score: 0.1"],
        "30": ["step 30", "score: 3"],
        "59": ["step 59", "score: 5.9"],
        "outside": True,
    }


def test_the_box_of_a_chart_is_where_its_axes_are_drawn(tmp_path: Path) -> None:
    start(tmp_path, range(0, 60))
    history = load_history(tmp_path)
    chart = panel_chart(history, panels(history)[0])
    svg = ElementTree.fromstring(b64decode(chart.svg))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    (axes,) = (group for group in svg.iter() if group.attrib.get("id") == "patch_2")  # the background of the axes
    numbers = [float(n) for n in re.findall(r"-?[\d.]+", next(path.attrib["d"] for path in axes if "d" in path.attrib))]
    xs, ys = numbers[::2], numbers[1::2]
    drawn = (min(xs) / width, min(ys) / height, (max(xs) - min(xs)) / width, (max(ys) - min(ys)) / height)
    assert chart.box == pytest.approx(drawn, abs=0.005)
    assert chart.x_range[0] <= 1 and chart.x_range[1] >= 59
