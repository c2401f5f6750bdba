"""A program that `forked` runs is as if it was started: its words, environment, folder, streams, status, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json
import multiprocessing
import os
import sys

import beside_it
import of_python_path


def double(number):
    return 2 * number


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        doubled = pool.map(double, [3])
    seen = {
        "words": sys.argv[1:],
        "folder": os.getcwd(),
        "own": os.environ["OWN"],
        "doubled": doubled,
        "input": sys.stdin.read(),
        "imported": ["torch" in sys.modules, "ray" in sys.modules],
    }
    from ray._private.ray_constants import RAY_LOG_TO_DRIVER_EVENT_LEVEL

    seen["setting"] = RAY_LOG_TO_DRIVER_EVENT_LEVEL
    print(json.dumps(seen))
    print("an error", file=sys.stderr)
    sys.exit(7)
"""
WAITS = """
import sys
import time

try:
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    sys.exit(5)
"""
ENDS = """
import atexit
import os
import signal
import sys
import threading
import time


def late():
    time.sleep(0.2)
    print("thread", end=" ")


print("begun", end=" ")  # not flushed
atexit.register(print, "handler", end="")
threading.Thread(target=late).start()
if sys.argv[1] == "message":
    sys.exit("what is wrong")
if sys.argv[1] == "error":
    raise ValueError("what is wrong")
if sys.argv[1] == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""


def test_words_environment_folder_streams_and_status(forked: str, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "of_python_path.py").touch()
    (tmp_path / "beside_it.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path / "own"), os.environ["PYTHONPATH"]])
    environment = os.environ | {"PYTHONPATH": path, "OWN": "x"}
    setting = {"RAY_LOG_TO_DRIVER_EVENT_LEVEL": "ERROR"}  # read when Ray is imported
    for words, of_ray in ((["program.py"], {}), (["-m", "program"], {}), (["program.py"], setting)):
        done = subprocess.run(
            [forked, *words, "a b", "c=d"],
            cwd=tmp_path,
            env=environment | of_ray,
            input="given",
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 7, done.stderr
        assert json.loads(done.stdout) == {
            "words": ["a b", "c=d"],
            "folder": str(tmp_path),
            "own": "x",
            "doubled": [6],
            "input": "given",
            "imported": [True, not of_ray],
            "setting": "ERROR" if of_ray else "INFO",
        }
        assert "an error" in done.stderr


def test_processes_of_a_program_start_where_engines_are_forked_too(
    ray_session: None, forked: str, tmp_path: Path
) -> None:
    """The environment then names a server for processes of engines, which `multiprocessing` in the program uses."""
    (tmp_path / "beside_it.py").touch()
    (tmp_path / "of_python_path.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [forked, "program.py"],
        cwd=tmp_path,
        env=os.environ | {"OWN": "x"},
        input="",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 7 and json.loads(done.stdout)["doubled"] == [6], done.stderr


def test_signals_reach_the_program(forked: str, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    for number, status in ((signal.SIGINT, 5), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen([forked, "waits.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.wait(60) == status
            assert process.stdout.read() == ""  # nobody has it open any more: the program has ended


def test_a_program_ends_as_pythons_own_does(forked: str, tmp_path: Path) -> None:
    """Status, message, threads that are waited for, exit handlers, and output that was not flushed."""
    (tmp_path / "ends.py").write_text(ENDS)
    for way in ("end", "message", "error", "interrupt"):
        given, expected = (
            subprocess.run([python, "ends.py", way], cwd=tmp_path, capture_output=True, text=True)
            for python in (forked, sys.executable)
        )
        assert (given.returncode, given.stdout) == (expected.returncode, expected.stdout), way
        assert expected.stdout == "begun thread handler"
        assert given.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:], way


def test_open_files_that_are_passed_on_arrive_under_their_numbers(forked: str, tmp_path: Path) -> None:
    (tmp_path / "writes.py").write_text("import os, sys\nos.write(int(sys.argv[1]), b'given')\n")
    reader, writer = os.pipe()
    status = subprocess.run([forked, "writes.py", str(writer)], cwd=tmp_path, pass_fds=[writer]).returncode
    os.close(writer)
    with open(reader) as stream:
        assert (status, stream.read()) == (0, "given"), "and nobody has the pipe open any more"


def test_what_is_not_a_program_is_run_by_python_itself(forked: str) -> None:
    code = "import sys; print(sys.executable)"
    assert subprocess.check_output([forked, "-c", code], text=True).strip() == sys.executable


@pytest.mark.parametrize("words", [["-u"], ["-W", "error"], []], ids=str)
@pytest.mark.usefixtures("forked_children")
def test_children_of_the_library_are_forked_and_others_started(words: list[str]) -> None:
    """By what their command says; a child that is forked finds imports done."""
    code = (
        "import sys, warnings; print('torch' in sys.modules, sys.argv[1:], [each[0] for each in warnings.filters[:1]])"
    )
    for mark, imported in (("hybridrl.utils.agent_host", True), ("another", False)):
        command = [sys.executable, *words, "-c", f"{code}  # {mark}", "a word"]
        shown = subprocess.check_output(command, text=True).strip()
        assert shown.startswith(f"{imported} ['a word']"), (mark, shown)
        assert "-W" not in words or shown.endswith("['error']"), shown
