"""Whether processes get on: real ones that compute, sleep, write, end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybridrl.utils.movement import Movement, StartWatch, family

LOOKS, LOOK_S = 30, 0.1


def looks(
    program: str, folder: Path, after: Callable[[subprocess.Popen[bytes], int], None] | None = None, **options: Any
) -> float:
    """For which part of the time a program was still at the end of some looks, the first of which finds it started."""
    process = subprocess.Popen([sys.executable, "-S", "-c", program])
    try:
        time.sleep(1)
        movement = Movement(lambda: [psutil.Process(process.pid)], lambda: folder, **options)
        for number in range(LOOKS):
            still = movement.still_s()
            if after is not None:
                after(process, number)
            time.sleep(LOOK_S)
        return still / (time.monotonic() - movement.began)
    finally:
        process.kill()
        process.wait()


def test_one_that_sleeps_is_still_and_one_that_computes_is_not(tmp_path: Path) -> None:
    assert looks("import time; time.sleep(1000)", tmp_path) > 0.8
    assert looks("while True: pass", tmp_path) < 0.5


def test_a_log_that_grows_is_movement_and_its_end_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "raylet.out"

    def write(process: subprocess.Popen[bytes], number: int) -> None:
        with log.open("a") as file:
            file.write(f"line {number}\n")

    assert looks("import time; time.sleep(1000)", tmp_path, write) < 0.5
    assert looks("import time; time.sleep(1000)", tmp_path, write, chatty=["raylet."]) > 0.8
    movement = Movement(lambda: [], lambda: tmp_path)
    assert movement.last_lines(2).endswith(f"raylet.out:\n  line {LOOKS - 2}\n  line {LOOKS - 1}")
    (tmp_path / "monitor.log").write_text("a later line of another process\n")
    assert "monitor.log:" in movement.last_lines() and "raylet.out:" in movement.last_lines(of=["raylet"])
    assert "has no logs" in Movement(lambda: [], lambda: tmp_path / "none").last_lines()


def test_the_end_of_a_process_is_movement(tmp_path: Path) -> None:
    def end(process: subprocess.Popen[bytes], number: int) -> None:
        if number == LOOKS - 3:
            process.kill()

    assert looks("import time; time.sleep(1000)", tmp_path, end) < 0.5


def test_reading_and_writing_is_movement_where_it_counts(tmp_path: Path) -> None:
    program = "import time\nwhile True:\n    open('/dev/null', 'w').write('x' * 9999)\n    time.sleep(0.05)"
    assert looks(program, tmp_path, io=True) < 0.5


def test_a_start_goes_on_while_something_moves_and_long_waits_are_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hybridrl.utils.movement._TELL_S", 0.1)
    programs = {"busy": "while True: pass", "still": "import time; time.sleep(1000)"}
    processes = {name: subprocess.Popen([sys.executable, "-S", "-c", text]) for name, text in programs.items()}
    try:
        watches = {
            name: StartWatch(f"the {name} one", Movement(lambda pid=process.pid: family(pid)), still_s=3.0)
            for name, process in processes.items()
        }
        while (why := watches["still"].why_given_up()) is None:
            assert watches["busy"].why_given_up() is None
            time.sleep(LOOK_S)
        assert "nothing has moved" in why and watches["busy"].waited_s > 3.0
        assert "waiting for the busy one" in capfd.readouterr().err
        limited = StartWatch("it", Movement(lambda: family(processes["busy"].pid)), limit_s=0.0)
        assert "limit of 0 s" in str(limited.why_given_up())  # what the user has set holds whatever moves
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    assert family(processes["busy"].pid) == []
