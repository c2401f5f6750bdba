"""What a controller that was killed leaves behind is ended, whenever it began."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

#: a process with two children, as the raylet is: one that was seen, and one that begins when a line is read. That leads
#: a process group, has the name of a worker, and starts a child that stays when it is gone, and a daemon.
RAYLET = """
import os, subprocess, sys

first = subprocess.Popen(["sleep", "1000"])
raylet = sys.argv[1] or str(os.getpid())
sys.stdin.readline()
worker = os.fork()
if not worker:
    os.setpgid(0, 0)
    code = (
        "import os, subprocess, sys; children = [subprocess.Popen(['sleep', '1000']),"
        " subprocess.Popen(['sleep', '1000'], start_new_session=True)];"
        "print(sys.argv[1], os.getpid(), *[child.pid for child in children], flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "RAY_RAYLET_PID": raylet}
    os.execve(sys.executable, ["ray::Worker", "-c", code, str(first.pid)], environment)
os.wait()
"""
CONTROLLER = """
import sys
from hybridrl.single_controller.ray.reaper import Reaper

reaper = Reaper([int(sys.argv[1])])
print("watches", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(("dies", "of"), [("worker", ""), ("raylet", ""), ("raylet", "1")])
def test_what_a_worker_started_is_ended_though_it_was_never_seen(dies: str, of: str) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    raylet = subprocess.Popen([sys.executable, "-c", RAYLET, of], **pipes)
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, str(raylet.pid)], **pipes)
    assert controller.stdout and raylet.stdin and raylet.stdout
    processes: list[psutil.Process] = []
    try:
        assert controller.stdout.readline() == "watches\n"
        psutil.wait_procs(psutil.Process(controller.pid).children(), timeout=2)  # it looks, and then after 5 s
        raylet.stdin.write("\n")
        raylet.stdin.flush()
        processes = [psutil.Process(int(pid)) for pid in raylet.stdout.readline().split()]
        first, worker, child, daemon = processes
        raylet.kill()
        if dies == "worker":
            worker.kill()
        controller.kill()
        _, alive = psutil.wait_procs([first] if of else [first, worker, child], timeout=40)
        assert not alive
        assert daemon.is_running(), "it has left the group of its worker"
        assert child.is_running() is bool(of), "another raylet's is left alone"
    finally:
        for process in (*processes, psutil.Process(raylet.pid), psutil.Process(controller.pid)):
            if process.is_running():
                process.kill()
        raylet.communicate()
        controller.communicate()
