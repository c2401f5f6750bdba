"""Whether processes get on: real ones that compute, sleep, write, end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from hybridrl.utils.movement import Movement

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
