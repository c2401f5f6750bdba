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
