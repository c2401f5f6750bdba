"""What signals do to a program before and after it listens for them itself: real ones, to a program of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = """
import os, pathlib, sys, time
from hybridrl.utils.termination import Terminated, ending_in_order, settle

go = pathlib.Path(sys.argv[1]) / "go"

def waits():
    while not go.exists():
        time.sleep(0.05)

try:
    with ending_in_order():
        if sys.argv[2] == "over":
            settle()
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        try:
            print(child, flush=True)
            waits()
        except KeyboardInterrupt:
            print("ends what it has started", flush=True)
            waits()
            print("in order", flush=True)
            raise
except Terminated as terminated:
    terminated.end()
print("done", flush=True)
"""


@pytest.fixture
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        yield process
        process.kill()


def line_of(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().rstrip()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
@pytest.mark.parametrize("program", ["starts"], indirect=True)
def test_it_ends_what_it_started_and_then_by_the_signal(program, tmp_path: Path, name: str) -> None:
    child = int(line_of(program))
    program.send_signal(signal.Signals[name])
    assert line_of(program) == "ends what it has started"
    program.send_signal(signal.Signals[name])  # `timeout` sends it twice
    (tmp_path / "go").touch()
    assert line_of(program) == "in order"
    assert program.wait(60) == -signal.Signals[name]
    subprocess.run(["kill", str(child)], check=True)  # one that was forked has the default: this ends it


@pytest.mark.parametrize("program", ["over"], indirect=True)
def test_it_ends_with_its_own_status_where_all_is_done(program, tmp_path: Path) -> None:
    child = int(line_of(program))
    program.send_signal(signal.SIGTERM)
    assert "the run is over and its processes are ending" in line_of(program)
    (tmp_path / "go").touch()
    assert line_of(program) == "done" and program.wait(60) == 0
    subprocess.run(["kill", str(child)], check=True)


BLOCKED = """
import subprocess, threading
from pathlib import Path
from hybridrl.processes.inherited import STOP_SIGNALS, block_stop_signals
from hybridrl.utils.termination import ending_in_order

def blocked(pid):
    (mask,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigBlk" in line]
    return {number for number in STOP_SIGNALS if int(mask, 16) >> (number - 1) & 1}

def start():
    # as Ray starts its processes: with a function that is called in the child
    with subprocess.Popen(["sleep", "1000"], preexec_fn=lambda: None) as process:
        found.append(blocked(process.pid))
        process.kill()

def start_blocked():
    block_stop_signals()
    start()

found = []
with ending_in_order():
    start()
    thread = threading.Thread(target=start_blocked)
    thread.start()
    thread.join()
assert found == [set(), set(STOP_SIGNALS)], found
"""


def test_rays_processes_still_block_the_signals_that_stop_the_job() -> None:
    """They ended a run: SIGUSR1 of a batch system, which goes to every process of the job, killed Ray's agent."""
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
