"""What a run records of its starts and ends, without workers."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from hybridrl.config import load_config
from hybridrl.errors import UserError
from hybridrl.notify import notify
from hybridrl.observe.events import read_events
from hybridrl.trainer.run import TrainingRun


def test_events_of_a_run_that_fails_and_is_resumed(tmp_path: Path) -> None:
    """The file says how each start ended, and everything told meanwhile with its step; the report shows it."""
    words = ["data.train_files=a.parquet", "model.path=x", f"trainer.default_local_dir={tmp_path}"]
    config = load_config("sft_trainer", [*words, "trainer.save_freq=2", "trainer.logger=[]"])

    def train(fail_at: int | None) -> None:
        with TrainingRun(config, config.trainer, 4, identity={"model": "x"}) as run:
            run.restore(lambda folder, state: None)
            while not run.is_last:
                with run.measured_step():
                    if run.step == fail_at:
                        raise ValueError("no luck\nsecond line")
                run.report({"train/loss": 1.0})
                run.save_if_due(lambda folder: {})
            notify("the last step is done")

    with pytest.raises(ValueError, match="no luck"):
        train(fail_at=3)
    train(fail_at=None)
    events = read_events(tmp_path)
    kinds = [(event["kind"], event["step"]) for event in events if event["kind"] in ("start", "resume", "end")]
    assert kinds == [("start", 0), ("end", 3), ("start", 0), ("resume", 2), ("end", 4)]
    assert [event["text"] for event in events if event["kind"] == "end"] == ["ValueError: no luck", "finished"]
    told = {event["text"]: event["step"] for event in events if event["kind"] == "notice"}
    assert told["the last step is done"] == 4 and any("resumed from" in text for text in told)
    page = (tmp_path / "report.html").read_text()
    assert "ValueError: no luck" in page and "2 → 4" in page


def test_a_run_that_starts_over_forgets_the_events_of_the_one_before(tmp_path: Path) -> None:
    """As its metrics. A run that continues, or that tries again before its first checkpoint, keeps them."""
    words = ["data.train_files=a.parquet", "model.path=x", f"trainer.default_local_dir={tmp_path}"]

    def train(mode: str, save: bool) -> None:
        settings = [f"trainer.resume_mode={mode}", "trainer.logger=[]", "trainer.report=False"]
        config = load_config("sft_trainer", [*words, *settings])
        with TrainingRun(config, config.trainer, 1, identity={"model": "x"}) as run:
            run.restore(lambda folder, state: None)
            while not run.is_last:
                with run.measured_step():
                    run.report({"train/loss": 1.0})
                if save:
                    run.save(lambda folder: {})

    starts = []
    for mode, save in (("auto", False), ("auto", True), ("auto", True), ("disable", True), ("auto", True)):
        train(mode, save)
        starts.append(sum(event["kind"] == "start" for event in read_events(tmp_path)))
    assert starts == [1, 2, 3, 1, 2]


def test_a_run_that_cannot_start_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracking service that cannot be opened: the folder is free again, and Ctrl-C means what it meant."""
    words = ["data.train_files=a.parquet", "model.path=x", f"trainer.default_local_dir={tmp_path}"]
    config = load_config("sft_trainer", [*words, "trainer.logger=[]"])
    before = signal.getsignal(signal.SIGINT)
    (tmp_path / "metrics.jsonl").mkdir()  # so that Tracking cannot open it
    run = TrainingRun(config, config.trainer, 4, identity={"model": "x"})
    with pytest.raises((UserError, OSError)):
        run.__enter__()
    assert signal.getsignal(signal.SIGINT) is before
    (tmp_path / "metrics.jsonl").rmdir()
    with TrainingRun(config, config.trainer, 4, identity={"model": "x"}) as again:
        assert again.step == 0


HUNG_UP = """
import os, select, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # in all threads: it arrives late
from hybridrl.config import load_config
from hybridrl.notify import notify
from hybridrl.trainer.run import TrainingRun

folder, how = sys.argv[1:]
words = ["data.train_files=a.parquet", "model.path=x", f"trainer.default_local_dir={folder}", "trainer.report=False"]
config = load_config("sft_trainer", words)
gone = select.poll()
gone.register(os.dup(1), select.POLLHUP if how == "terminal" else select.POLLERR)
with TrainingRun(config, config.trainer, 100, identity={"model": "x"}) as run:
    run.restore(lambda folder, state: None)
    notify("ready")
    gone.poll()
    while not run.is_last:
        with run.measured_step():
            pass
        run.report({"train/loss": 1.0})
        notify(f"step {run.step}")
        if run.step == 3:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        if how == "pipe" and run.step == 5:
            signal.raise_signal(signal.SIGTERM)
        run.save_if_due(lambda folder: {})
sys.exit(run.outcome.exit_code)
"""


@pytest.mark.parametrize("how", ["terminal", "pipe"])
def test_output_without_a_reader_does_not_end_a_run(tmp_path: Path, how: str) -> None:
    """Writes fail before the run hears of SIGHUP, or without any signal. What is written goes into a file."""
    ours, theirs = os.openpty() if how == "terminal" else os.pipe()

    def own_the_terminal() -> None:
        if how == "terminal":
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, "-c", HUNG_UP, str(tmp_path), how],
        stdin=theirs if how == "terminal" else subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
        start_new_session=True,
        preexec_fn=own_the_terminal,
    )
    try:
        os.close(theirs)
        said = b""
        while b"ready" not in said:
            found = os.read(ours, 65536)
            assert found, said
            said += found
        os.close(ours)
        status = process.wait(200)
    finally:
        process.kill()
        process.wait()
    last = 3 if how == "terminal" else 5
    told = (tmp_path / "after_hangup.log").read_text()
    assert status == 75, told
    assert f"step   {last}/100" in told and f"notice: step {last}" in told and "stopped by SIG" in told
    assert (tmp_path / f"global_step_{last}").is_dir()
    (end,) = (event for event in read_events(tmp_path) if event["kind"] == "end")
    assert end["text"].startswith("stopped by SIG") and end["step"] == last


REENTERED = """
import signal, sys, threading, time
from pathlib import Path
from hybridrl.trainer.interrupt import StopRequest

folder, writer = Path(sys.argv[1]), threading.get_ident()

def send():
    time.sleep(1)
    signal.pthread_kill(writer, signal.SIGINT)
    time.sleep(1)
    (folder / "sent").touch()

with StopRequest(folder) as stop:
    threading.Thread(target=send, daemon=True).start()
    sys.stderr.write("x" * 2**20)
    sys.stderr.flush()
assert stop.requested == "SIGINT"
"""


def test_a_signal_while_output_is_written(tmp_path: Path) -> None:
    """The handler cannot use the stream that its thread is in the middle of."""
    ours, theirs = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen([sys.executable, "-c", REENTERED, str(tmp_path)], stderr=theirs, env=environment)
    os.close(theirs)
    deadline = time.monotonic() + 200
    while not (tmp_path / "sent").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)  # the pipe is full, so that the process waits in the middle of a write
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read()
    assert process.wait(60) == 0, said[-2000:]
    assert said.count(b"x") >= 2**20 and b"SIGINT: the run stops" in said
