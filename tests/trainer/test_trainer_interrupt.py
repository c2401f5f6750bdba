"""Which signals stop a run, and what further ones do: a program of its own, signalled as batch systems do."""

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
from hybridrl.trainer.interrupt import StepAbandoned, StopRequest

folder = pathlib.Path(sys.argv[1])

def waits_for(name):
    while not (folder / name).exists():
        time.sleep(0.05)

with StopRequest(folder) as stop:
    print("ready", flush=True)
    try:
        waits_for("next")  # an update
        with stop.abandonable():  # a generation
            print("generates", flush=True)
            waits_for("go")
    except StepAbandoned:
        print("saves", flush=True)
        waits_for("go")
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
    (tmp_path / "next").touch()
    (tmp_path / "go").touch()
    assert program.communicate(timeout=60)[0].splitlines()[-1] == f"ended in order after {first}"
    assert program.returncode == 0


NO_COPY_S = 5.2  # what comes later is another request


def sends(program: subprocess.Popen[str], name: str, *lines: str) -> None:
    """Send the signal, and read what the program says."""
    assert program.stdout is not None
    program.send_signal(signal.Signals[name])
    for words in lines:
        assert words in program.stdout.readline()


@pytest.mark.parametrize("generates", [True, False])
def test_a_second_sigterm_leaves_the_step_where_its_weights_are_whole_and_a_third_ends_it(
    program, tmp_path: Path, generates: bool
) -> None:
    if generates:
        (tmp_path / "next").touch()
        assert program.stdout.readline() == "generates\n"
    sends(program, "SIGTERM", "SIGTERM once more leaves the step")
    time.sleep(NO_COPY_S)
    if generates:
        sends(program, "SIGTERM", "saves")
    else:
        sends(program, "SIGTERM", "ends as soon as they are whole")
        (tmp_path / "next").touch()
        assert program.stdout.readline() == "saves\n", "without the step that would begin"
    sends(program, "SIGTERM")  # a copy of the second
    time.sleep(NO_COPY_S)
    sends(program, "SIGTERM")
    assert "in order" not in program.communicate(timeout=60)[0]
    assert program.returncode == -signal.SIGTERM


def test_a_second_ctrl_c_ends_it(program) -> None:
    sends(program, "SIGINT", "stops after this step")
    time.sleep(NO_COPY_S)
    sends(program, "SIGINT")
    output = program.communicate(timeout=60)[0]
    assert "in order" not in output and "KeyboardInterrupt" in output
    assert program.returncode == -signal.SIGINT


DEAD_RAY = """
import pathlib, subprocess, sys, time
from hybridrl.single_controller.ray.watch import ClusterWatch
from hybridrl.trainer.interrupt import StopRequest

raylet = subprocess.Popen(["sleep", "1000"])
watch = ClusterWatch({"raylet": raylet.pid}, "the logs")
with StopRequest(pathlib.Path(sys.argv[1])) as stop:
    raylet.kill()
    while stop.requested is None:
        time.sleep(0.05)
watch.dismiss()
print("stopped by", stop.requested)
"""


def test_the_end_of_rays_process_stops_the_run_as_a_signal_does(tmp_path: Path) -> None:
    """It went on for six steps, with the message that it could not, and ended with status 0."""
    command = [sys.executable, "-c", DEAD_RAY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "stopped by the end of Ray's process raylet\n"
    assert "error: Ray's process raylet was killed or crashed: the run stops after this step" in done.stderr
