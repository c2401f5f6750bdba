"""Children of a run end with it, and with all that they have started, whatever ends first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hybridrl.processes.child import Child, ending
from hybridrl.processes.frames import FrameConnection

HERE = str(Path(__file__).parent)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(HERE)
    children: list[Child] = []

    def make(task: str) -> tuple[Child, FrameConnection, list[int]]:
        children.append(Child("children"))
        connection = FrameConnection(children[-1].connection)
        connection.send(task.encode())
        return children[-1], connection, [int(pid) for pid in bytes(connection.receive()).split()]

    yield make
    for child in children:
        child.end()


@pytest.mark.parametrize("task", ["waits", "supervised"])
@pytest.mark.parametrize("how", ["end", "kill"])
def test_a_child_ends_with_all_that_it_started(start, task: str, how: str) -> None:
    child, _, pids = start(task)
    assert all(map(alive, pids))
    if how == "end":
        child.end()
    elif task == "supervised":
        os.kill(pids[0], signal.SIGKILL)
        assert child.wait(60) == -signal.SIGKILL, "the supervisor ends as what it watches"
    else:
        os.killpg(child.pid, signal.SIGKILL)
    assert gone([child.pid, *pids])


def test_a_supervisor_tells_the_exit_code(start) -> None:
    child, connection, pids = start("supervised and ends")
    assert ending(child.wait(60)) == "ended with exit code 3"
    with pytest.raises(EOFError):
        connection.receive()
    assert gone(pids)


@pytest.mark.parametrize("task", ["stops", "supervised and stops"])
def test_a_stopped_child_is_ended_too(start, task: str) -> None:
    child, _, pids = start(task)
    child.end(0.5)
    assert gone([child.pid, *pids])


RUN = """
import sys, time
sys.path.insert(0, sys.argv[1])
from hybridrl.processes.frames import FrameConnection
from hybridrl.processes.child import Child
for task in ("waits", "supervised"):
    child = Child("children")
    connection = FrameConnection(child.connection)
    connection.send(task.encode())
    print(child.pid, bytes(connection.receive()).decode(), flush=True)
import os
if os.fork() == 0:  # it inherits nothing that keeps the children alive
    time.sleep(1000)
print(flush=True)
time.sleep(1000)
"""


def test_children_end_with_a_run_that_is_killed() -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN, HERE], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in run.stdout.readline().split()]
    run.stdout.readline()
    forked = [process.pid for process in psutil.Process(run.pid).children() if process.pid not in pids]
    try:
        assert len(pids) == 7 and all(map(alive, pids)) and forked
        run.kill()
        run.wait()
        assert gone(pids)
    finally:
        for pid in forked:
            os.kill(pid, signal.SIGKILL)


def test_a_child_has_the_variables_of_the_run_and_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tells.py").write_text(
        "import os\nfrom hybridrl.processes.frames import FrameConnection\n"
        "def main(connection, life):\n"
        "    text = ' '.join(str(os.environ.get(name)) for name in ('MINE', 'GIVEN', 'DEFAULT', 'SET'))\n"
        "    FrameConnection(connection).send(text.encode())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MINE", "run")
    monkeypatch.setenv("GIVEN", "run")
    monkeypatch.setenv("SET", "run")
    child = Child("tells", variables={"GIVEN": "child"}, defaults={"DEFAULT": "default", "SET": "default"})
    assert bytes(FrameConnection(child.connection).receive()) == b"run child default run"
    assert child.end() == 0
