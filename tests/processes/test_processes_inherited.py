"""Signals that stop a job, in processes that are to outlive them and in what these start."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

WORKER = """
import os, signal, subprocess, sys, threading, time
from hybridrl.processes.inherited import block_stop_signals, ignore_stop_signals

number = signal.Signals[sys.argv[1]]
block_stop_signals()
os.kill(os.getpid(), number)  # before the worker is set up
ignore_stop_signals()
os.kill(os.getpid(), number)


program = subprocess.Popen(["sleep", "1000"])
program.send_signal(number)
in_thread = []
thread = threading.Thread(target=lambda: in_thread.append(subprocess.Popen(["sleep", "1000"])))
thread.start()
thread.join()
in_thread[0].send_signal(number)
forked = os.fork()
if not forked:
    time.sleep(1000)
    os._exit(0)
time.sleep(0.2)
os.kill(forked, number)
print(program.wait(), in_thread[0].wait(), -os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_a_worker_outlives_a_stop_signal_and_its_programs_do_not(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKER, name], capture_output=True, text=True, timeout=120, check=False
    )
    number = int(signal.Signals[name])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(-number), str(-number), str(number)]


REPLACED = """
import ctypes, os, signal, threading, time
from hybridrl.processes.inherited import keeping_handlers

heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))

def replace():  # as Ray's core does, in the thread that starts Ray
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    with keeping_handlers():
        for number in (signal.SIGTERM, signal.SIGHUP):
            library.signal(number, ctypes.cast(library.abort, ctypes.c_void_p))

thread = threading.Thread(target=replace)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
assert heard == [signal.SIGTERM]
os.kill(os.getpid(), signal.SIGHUP)  # had no handler: the block's stays
"""


def test_handlers_that_ray_replaces_come_back() -> None:
    done = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGABRT and not done.stderr, done.stderr
