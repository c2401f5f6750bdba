"""Which signals stop a run, and which second one ends it: a program of its own, signalled as batch systems do."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = """
import pathlib, sys, time
from hybridrl.trainer.interrupt import StopRequest

with StopRequest(pathlib.Path(sys.argv[1])) as stop:
    print("ready", flush=True)
    while not (pathlib.Path(sys.argv[1]) / "go").exists():
        time.sleep(0.05)
print("ended in order after", stop.requested, flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def heard(program: subprocess.Popen[str]) -> None:
    assert program.stdout is not None
    assert "stops after this step" in program.stdout.readline()


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("SIGTERM", ["SIGTERM"]),  # `timeout`: to the program and to its group
        ("SIGUSR1", ["SIGUSR1", "SIGTERM"]),
        ("SIGUSR2", ["SIGHUP", "SIGUSR1"]),
        ("SIGINT", ["SIGINT"]),
    ],
)
def test_copies_of_a_stop_request_do_not_end_the_run(program, tmp_path: Path, first: str, then: list[str]) -> None:
    program.send_signal(signal.Signals[first])
    heard(program)
    for name in then:
        program.send_signal(signal.Signals[name])
    time.sleep(0.2)
    (tmp_path / "go").touch()
    assert program.communicate(timeout=60)[0].splitlines()[-1] == f"ended in order after {first}"
    assert program.returncode == 0


@pytest.mark.parametrize(("name", "status"), [("SIGINT", -signal.SIGINT), ("SIGTERM", -signal.SIGTERM)])
def test_a_second_signal_that_is_no_copy_ends_it(program, name: str, status: int) -> None:
    program.send_signal(signal.Signals[name])
    heard(program)
    time.sleep(5.2)
    program.send_signal(signal.Signals[name])
    output = program.communicate(timeout=60)[0]
    assert "in order" not in output and ("KeyboardInterrupt" in output) is (name == "SIGINT")
    assert program.returncode == status
