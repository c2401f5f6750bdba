"""What a killed replica of vLLM leaves behind: nothing, and nobody else ended. Real processes, without vLLM itself."""

import os
import subprocess
import sys
import time

import psutil
import pytest

# A foreign process that adopts orphans, as a user's systemd does; below it the replica, its core, and a worker.
ADOPTER = """
import ctypes, subprocess, sys
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
replica = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2], sys.argv[3]])
print(replica.pid, flush=True)
sys.stdin.read()
"""
REPLICA = """
import os, subprocess, sys, time
os.environ["HYBRIDRL_REPLICA_PID"] = str(os.getpid())
if sys.argv[2] == "core and worker":
    core = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", core, sys.argv[1]])
else:
    subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(600)
"""
WORKER = """
import os, time
from hybridrl.rollout.vllm.parent_watch import end_with_owner
end_with_owner()
print("watching", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there is no pidfd here, and so no watching")
@pytest.mark.parametrize("processes", ["core and worker", "core that works itself"])
def test_all_of_a_killed_replica_ends_and_who_adopts_the_rest_lives(processes: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ADOPTER, REPLICA, WORKER, processes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as adopter:
        assert adopter.stdout is not None
        replica = psutil.Process(int(adopter.stdout.readline()))
        assert adopter.stdout.readline() == "watching\n"
        below = replica.children(recursive=True)
        assert len(below) == (2 if processes == "core and worker" else 1)
        replica.kill()
        deadline = time.monotonic() + 60
        while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in below):
            assert time.monotonic() < deadline, below
            time.sleep(0.05)
        assert adopter.poll() is None
        adopter.kill()
