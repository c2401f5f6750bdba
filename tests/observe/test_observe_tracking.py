"""Metrics on disk, on the screen and in real services, through resumes."""

import importlib.util
import json
import math
import os
import pty
import re
import shutil
import sqlite3
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from raising import raises_with

from hybridrl.errors import UserError
from hybridrl.observe import jsonl
from hybridrl.observe.console import step_line, validation_line
from hybridrl.observe.dump import cut_dumps_after, dump_generations, dumped_steps
from hybridrl.observe.run_folder import write_run_info
from hybridrl.observe.tracking import Tracking, TrackingError, check_loggers


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def track(folder: Path, loggers: object = (), **options: object) -> Tracking:
    return Tracking(loggers, "project", "experiment", folder, {"actor": {"lr": 1e-3}}, **options)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the file


def test_file_is_written_always_and_a_line_is_complete_before_log_returns(tmp_path: Path) -> None:
    tracking = track(tmp_path)
    tracking.log({"a": 1, "b": np.float32(0.5), "c": torch.tensor(2.0), "d": torch.tensor([3]), "e": True}, 1)
    assert lines(tmp_path) == [{"step": 1, "a": 1, "b": 0.5, "c": 2.0, "d": 3, "e": 1}]
    tracking.finish()
    tracking.finish()


def test_numbers_that_json_lacks_are_valid_json_and_come_back(tmp_path: Path) -> None:
    with track(tmp_path) as tracking:
        tracking.log({"nan": math.nan, "up": math.inf, "down": np.float64(-math.inf)}, 1)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert math.isnan(jsonl.number(record["nan"]) or 0.0)
    assert (jsonl.number(record["up"]), jsonl.number(record["down"])) == (math.inf, -math.inf)


@pytest.mark.parametrize("value", ["0.5", "NaN", None, [1, 2], {"x": 1}, object()])
def test_a_metric_that_is_no_number_is_named(tmp_path: Path, value: object) -> None:
    with track(tmp_path) as tracking, raises_with(ValueError, "actor/odd"):
        tracking.log({"actor/odd": value}, 1)
    assert lines(tmp_path) == []


def test_a_metric_called_step_is_refused(tmp_path: Path) -> None:
    with track(tmp_path) as tracking, raises_with(ValueError, "'step'"):
        tracking.log({"step": 3}, 1)


@pytest.mark.parametrize("torn", ['{"step": 3, "a": 0.', "{", '{"step":3}'])
def test_a_torn_last_line_is_cut_when_the_run_goes_on(tmp_path: Path, torn: str) -> None:
    with track(tmp_path) as tracking:
        for step in (1, 2):
            tracking.log({"a": step}, step)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(torn)
    assert [record["step"] for record in jsonl.read(tmp_path / "metrics.jsonl")] == [1, 2]
    with track(tmp_path) as tracking:
        tracking.log({"a": 3}, 3)
    assert [record["step"] for record in lines(tmp_path)] == [1, 2, 3]


def test_a_file_that_is_one_torn_line_only(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step"' + " " * 200_000)
    with track(tmp_path) as tracking:
        tracking.log({"a": 1}, 1)
    assert lines(tmp_path) == [{"step": 1, "a": 1}]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\n{"st\n{"step":3}\n')
    with raises_with(UserError, "metrics.jsonl", "line 2"), track(tmp_path) as tracking:
        tracking.cut_after(1)


def test_cut_after_forgets_later_metrics_and_dumps_and_keeps_the_others_byte_for_byte(tmp_path: Path) -> None:
    with track(tmp_path) as tracking:
        for step in range(8):
            tracking.log({"a": step / 3}, step)
            for kind in ("rollouts", "validation"):
                dump_generations(tmp_path / kind, step, ["in"], ["out"], [1.0])
        before = (tmp_path / "metrics.jsonl").read_text().splitlines()
        tracking.cut_after(4)
        assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:5]
        assert dumped_steps(tmp_path / "rollouts") == dumped_steps(tmp_path / "validation") == [0, 1, 2, 3, 4]
        tracking.log({"a": 5}, 5)
        tracking.cut_after(9)
        assert len(lines(tmp_path)) == 6
        tracking.cut_after(-1)
        assert lines(tmp_path) == [] == dumped_steps(tmp_path / "rollouts")


def test_dump_folders_elsewhere_are_cut_too(tmp_path: Path) -> None:
    dump_generations(tmp_path / "elsewhere", 5, ["in"], ["out"], [1.0])
    dump_generations(tmp_path / "run" / "rollouts", 5, ["in"], ["out"], [1.0])
    with track(tmp_path / "run", dump_folders=[tmp_path / "elsewhere"]) as tracking:
        tracking.cut_after(4)
    assert (dumped_steps(tmp_path / "elsewhere"), dumped_steps(tmp_path / "run" / "rollouts")) == ([], [5])


# ---------------------------------------------------------------- dumps


def test_dump_holds_the_columns(tmp_path: Path) -> None:
    path = dump_generations(
        tmp_path / "rollouts",
        12,
        inputs=["2+2", "ünïcode\n"],
        outputs=["4", "\u2028 odd line end"],
        scores=np.array([1.0, np.nan]),  # type: ignore[arg-type]
        gts=["4", {"answer": [5]}],
        extra={"uid": np.array(["a", "b"], dtype=object), "acc": [True, np.bool_(False)], "who": [Path("x"), None]},
    )
    assert path.name == "12.jsonl"
    first, second = jsonl.read(path)
    assert first == {
        "input": "2+2", "output": "4", "gts": "4", "score": 1.0, "uid": "a", "acc": True, "who": "x", "step": 12
    }  # fmt: skip
    assert (second["score"], second["gts"], second["output"]) == ("NaN", {"answer": [5]}, "\u2028 odd line end")


def test_dump_refuses_unequal_columns_and_leaves_nothing(tmp_path: Path) -> None:
    with raises_with(ValueError, "'acc'", "1 entries", "2 samples"):
        dump_generations(tmp_path, 1, ["a", "b"], ["a", "b"], [1, 2], extra={"acc": [1]})
    with raises_with(ValueError, "'score'"):
        dump_generations(tmp_path, 1, ["a"], ["a"], [1], extra={"score": [1]})
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- names of services


def test_unknown_and_missing_services_are_all_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = next((n for n in ("clearml", "wandb", "trackio") if importlib.util.find_spec(n) is None), None)
    if missing is None:
        pytest.skip("every service is installed here")
    # A folder that runs of the service leave behind looks like a package to Python.
    (tmp_path / missing).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TrackingError) as error:
        check_loggers(["console", "tensorbord", missing, "rl_insight"])
    text = str(error.value)
    assert "'tensorbord' is unknown; choose from console, file, tensorboard, wandb" in text
    assert "Did you mean 'tensorboard'?" in text
    assert f"{missing!r} needs the package {missing}, which is not installed: " in text
    assert "'rl_insight' is not supported: use" in text
    with pytest.raises(TrackingError):
        track(tmp_path / "run", [missing])
    assert not (tmp_path / "run").exists()


def test_known_names_pass() -> None:
    check_loggers(None)
    check_loggers("console")
    check_loggers(["console", "file", "tensorboard"])


def test_a_service_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "file"))
    with pytest.raises(TrackingError, match="tensorboard could not be opened"):
        track(tmp_path / "run", ["tensorboard"])


# ---------------------------------------------------------------- tensorboard


def scalars(folder: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {event.step: event.value for event in reader.Scalars(name)} if name in reader.Tags()["scalars"] else {}


def test_tensorboard_shows_one_curve_through_a_resume(tmp_path: Path) -> None:
    with track(tmp_path, ["tensorboard"]) as tracking:
        for step in range(1, 7):
            tracking.log({"critic/score/mean": float(step)}, step)
        tracking.log_generations([{"input": "a|b", "output": "c\nd", "score": 1.0}], 6)
    with track(tmp_path, ["tensorboard"]) as tracking:
        tracking.cut_after(3)
        for step in (4, 5):
            tracking.log({"critic/score/mean": step + 0.5}, step)
    assert scalars(tmp_path, "critic/score/mean") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.5, 5: 5.5}


def test_tensorboard_has_what_was_logged_when_the_process_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys, signal\nfrom hybridrl.observe.tracking import Tracking\n"
        "t = Tracking(['tensorboard'], 'p', 'e', sys.argv[1])\n"
        "for step in range(1, 4):\n    t.log({'x': step}, step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120, check=False)
    assert scalars(tmp_path, "x") == {1: 1.0, 2: 2.0, 3: 3.0}
    assert [record["step"] for record in lines(tmp_path)] == [1, 2, 3]


# ---------------------------------------------------------------- services of the `tracking` extra


def two_lives(name: str, folder: Path, notices: list[str]) -> None:
    """Steps 1 to 4, then a resume from step 2 that goes on to 6."""
    with track(folder, [name], notice=notices.append) as tracking:
        for step in range(1, 5):
            tracking.log({"critic/score/mean": step / 10, "val-core/a/acc/best@4/mean": 0.5, "bad": math.nan}, step)
        tracking.log_generations([{"input": "a", "output": "b", "score": 1.0, "gts": None}], 4)
    with track(folder, [name], notice=notices.append) as tracking:
        tracking.cut_after(2)
        for step in range(3, 7):
            tracking.log({"critic/score/mean": step / 10}, step)


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is in the `tracking` extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    notices: list[str] = []
    two_lives("wandb", tmp_path, notices)
    assert notices == []
    memory = json.loads((tmp_path / "tracking.json").read_text())
    runs = [path.name for path in (tmp_path / "wandb").iterdir() if path.name.startswith("offline-run-")]
    assert len(runs) == 2
    assert all(name.endswith(memory["wandb"]["id"]) for name in runs)
    assert memory["sent_up_to"] == 4


def test_mlflow_keeps_one_run_and_repeats_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is in the `tracking` extra")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    notices: list[str] = []
    two_lives("mlflow", tmp_path, notices)
    assert notices == []
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        rows = database.execute("select step, value from metrics where key = 'critic/score/mean' order by step")
        assert rows.fetchall() == [(step, pytest.approx(step / 10)) for step in range(1, 7)]
        assert database.execute("select count(*), min(status) from runs").fetchall() == [(1, "FINISHED")]
        assert ("actor.lr", "0.001") in database.execute("select key, value from params").fetchall()
        keys = {key for (key,) in database.execute("select distinct key from metrics")}
    assert "val-core/a/acc/best_at_4/mean" in keys


def test_swanlab_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab", reason="swanlab is in the `tracking` extra")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    notices: list[str] = []
    two_lives("swanlab", tmp_path, notices)
    assert notices == []
    assert len([path for path in (tmp_path / "swanlog").iterdir() if path.name.startswith("run-")]) == 2


def test_trackio_keeps_one_run_and_repeats_no_step(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="trackio is in the `tracking` extra")
    # In a process of its own: trackio reads its folder from the environment when it is imported.
    code = (
        "import json, sys\nfrom pathlib import Path\nimport test_observe_tracking as t\n"
        "notices = []\nt.two_lives('trackio', Path(sys.argv[1]), notices)\nassert notices == [], notices\n"
        "from trackio.sqlite_storage import SQLiteStorage as storage\n"
        "runs = storage.get_runs('project')\n"
        "print('RESULT' + json.dumps([storage.get_logs('project', run) for run in runs], default=str))\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": paths}
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, timeout=180, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (logs,) = json.loads(done.stdout.split("RESULT")[1])
    scores = [(entry["step"], entry["critic/score/mean"]) for entry in logs if "critic/score/mean" in entry]
    assert scores == [(step, step / 10) for step in range(1, 7)]


def test_starting_anew_in_the_folder_begins_a_new_online_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is in the `tracking` extra")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for attempt in (1, 2):
        with track(tmp_path, ["mlflow"]) as tracking:
            tracking.cut_after(-1)
            tracking.log({"x": float(attempt)}, 1)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        assert sorted(database.execute("select value from metrics where key = 'x'").fetchall()) == [(1.0,), (2.0,)]
        assert database.execute("select count(*) from runs").fetchone() == (2,)


# ---------------------------------------------------------------- the screen

CONSOLE = """
import sys, time
from hybridrl.observe.tracking import Tracking
with Tracking(["console"], "p", "e", sys.argv[1], total_steps=20) as tracking:
    for step in (9, 10):
        tracking.status("generating")
        tracking.log({"critic/score/mean": step / 20, "actor/[bold]x": 1, "timing_s/step": 0.25}, step)
        time.sleep(0.6)
    tracking.log({"val-core/sort/acc/mean@1": 0.75, "val-aux/sort/acc/std@1": 0.1}, 10)
"""


def test_console_without_a_terminal_is_plain_lines(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CONSOLE, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == (
        "step  9/20  score 0.450  time 0.25s\n"
        "step 10/20  score 0.500  time 0.25s\n"
        "step 10/20  validation  sort/acc/mean@1 0.7500\n"
    )
    assert done.stderr == ""


def test_console_on_a_terminal_has_lines_and_a_bar(tmp_path: Path) -> None:
    control, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    with subprocess.Popen(
        [sys.executable, "-c", CONSOLE, str(tmp_path)], stdout=terminal, stderr=subprocess.PIPE, env=environment
    ) as process:
        os.close(terminal)
        output = b""
        while True:
            try:
                block = os.read(control, 65536)
            except OSError:  # the terminal's last user is gone
                break
            if not block:
                break
            output += block
        _, err = process.communicate(timeout=60)
    os.close(control)
    assert process.returncode == 0, err
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    for wanted in ("step  9/20  score 0.450", "validation  sort/acc/mean@1 0.7500", "generating", "10/20"):
        assert wanted in text
    assert "\x1b[" in output.decode()


def test_step_line_shows_what_there_is() -> None:
    assert step_line({"val-core/a/acc/mean@1": 1.0}, 1, 10) == ""
    assert validation_line({"critic/score/mean": 1.0}, 1, 10) == ""
    same = {"critic/score/mean": 0.5, "critic/rewards/mean": 0.5}
    assert step_line(same, 3, None) == "step 3  score 0.500"
    assert "reward 0.400" in step_line(same | {"critic/rewards/mean": 0.4}, 3, None)
    kinds = {"actor/ppo_kl": 1e-3, "actor/kl_loss": 2e-3, "actor/reward_kl_penalty": 3e-3}
    assert step_line(kinds, 3, None) == "step 3  ppo_kl 1.0e-03  kl_loss 2.0e-03  kl_penalty 3.0e-03"
    assert "grad nan" in step_line({"actor/grad_norm": math.nan}, 3, None)


# ---------------------------------------------------------------- the run's folder


def test_run_folder_keeps_settings_and_versions(tmp_path: Path) -> None:
    import yaml

    config = {"trainer": {"n": 1, "name": "ünï"}, "lr": 1e-3, "nothing": None, "files": ["a", Path("b")], "inf": 1e400}
    write_run_info(tmp_path / "run", config)
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["trainer"] == {"n": 1, "name": "ünï"}
    assert (saved["lr"], saved["nothing"], saved["files"]) == (1e-3, None, ["a", "b"])
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert versions["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    installed = {one.metadata["Name"] for one in metadata.distributions() if one.metadata["Name"]}
    assert versions["packages"] == {name: metadata.version(name) for name in installed}
    assert versions["python"] == sys.version.split()[0]
    assert versions["device"]["kind"] in ("cpu", "cuda")


def test_run_folder_takes_dataclasses_and_omegaconf(tmp_path: Path) -> None:
    import dataclasses

    import yaml
    from omegaconf import OmegaConf

    @dataclasses.dataclass
    class Inner:
        lr: float = 0.5
        betas: tuple[float, float] = (0.9, 0.99)

    @dataclasses.dataclass
    class Outer:
        optim: Inner = dataclasses.field(default_factory=Inner)

    write_run_info(tmp_path, Outer())
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"optim": {"lr": 0.5, "betas": [0.9, 0.99]}}
    write_run_info(tmp_path, OmegaConf.create({"a": 1, "b": "${a}"}))
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"a": 1, "b": 1}
    with pytest.raises(TypeError, match="not int"):
        write_run_info(tmp_path, 3)


def test_a_run_folder_that_is_removed_is_noticed_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Tracking([], "p", "e", folder) as tracking:
        tracking.log({"a": 1.0}, step=1)
        shutil.rmtree(folder)
        with raises_with(UserError, "metrics.jsonl"):
            tracking.log({"a": 2.0}, step=2)
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("of another run\n")
        with raises_with(UserError, "metrics.jsonl"):
            tracking.log({"a": 2.0}, step=2)


def test_metrics_are_on_the_disk_when_they_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    with Tracking([], "p", "e", tmp_path) as tracking:
        monkeypatch.setattr(os, "fsync", noting)
        tracking.log({"a": 1.0}, step=1)
    assert str(tmp_path / "metrics.jsonl") in synced


# A limit on file size makes write() fail as a full disk does.
WRITE_METRICS_PAST_A_LIMIT = """
import resource, sys
from hybridrl.errors import DiskFullError
from hybridrl.observe.tracking import Tracking
tracking = Tracking([], "p", "e", sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
    tracking.log({f"metric/{i}": 1.5 for i in range(100)}, step=1)
except DiskFullError as error:
    print(error)
"""


def test_no_space_for_metrics_names_file_and_remedy(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE_METRICS_PAST_A_LIMIT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert str(tmp_path / "metrics.jsonl") in done.stdout, done.stderr
    assert "MiB are free" in done.stdout and "trainer.max_actor_ckpt_to_keep" in done.stdout


def test_a_resumed_run_removes_what_a_killed_one_was_writing(tmp_path: Path) -> None:
    for name in ("1.jsonl", "2.jsonl", "3.jsonl", ".3.jsonl.4711.0badf00d.tmp", "notes.txt"):
        (tmp_path / name).touch()
    cut_dumps_after(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.jsonl", "2.jsonl", "notes.txt"]
