"""No process of the pool is left where the program that started it dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from reward_tools import alive, gone_within

PARENT = """
import os, sys, threading, time
from hybridrl.reward import RewardFunction, RewardPool
from hybridrl.reward.signature import Sample
pool = RewardPool(RewardFunction(sys.argv[1]), 2, 1000.0)
print("started without a guard for __main__", flush=True)
pool.run([Sample("", "", "", {"i": i, "folder": sys.argv[2]}) for i in range(2)])
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_its_parent(user_file, tmp_path, end):
    """The parent dies while one process is stuck in C code under the interpreter lock and one waits for a child."""
    path = user_file(
        """
        import os, re, subprocess
        def f(solution_str, ground_truth, extra_info):
            child = subprocess.Popen(["sleep", "1000"])
            note = os.path.join(extra_info["folder"], f"note{extra_info['i']}")
            with open(note + ".part", "w") as file:
                file.write(f"{os.getpid()} {child.pid}")
            os.rename(note + ".part", note)
            if extra_info["i"] == 0:
                re.match("(a+)+$", "a" * 60 + "b")
            child.wait()
        """
    )
    parent_file = user_file(PARENT, "parent.py")  # a script without a __main__ guard
    parent = subprocess.Popen([sys.executable, parent_file, path, str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        notes = [tmp_path / f"note{i}" for i in range(2)]
        deadline = time.monotonic() + 300
        while not all(note.exists() for note in notes) and time.monotonic() < deadline:
            time.sleep(0.02)
        pids = [int(pid) for note in notes for pid in note.read_text().split()]
        assert len(pids) == 4 and all(map(alive, pids))
        parent.send_signal(end)
        parent.wait(timeout=120)
    finally:
        parent.kill()
        parent.wait()
    assert all(gone_within(pid, 60) for pid in pids)
