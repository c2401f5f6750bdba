"""What a killed replica of vLLM leaves behind: nothing, and nobody else ended. Real processes, without vLLM itself."""

import os
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

ROLLOUT = Path(__file__).parents[2] / "hybridrl" / "rollout"
# Both modules need the standard library and psutil alone. Without the packages above them a process needs 0.2 s of
# processor time instead of 6 s.
ALONE = f"""
import sys, types
for name, folder in {[("hybridrl.rollout", str(ROLLOUT)), ("hybridrl.rollout.vllm", str(ROLLOUT / "vllm"))]}:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
"""
# A foreign process that adopts orphans, as a user's systemd does; below it the replica, its core, and a worker.
ADOPTER = """
import ctypes, subprocess, sys
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
replica = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2], sys.argv[3]])
sys.stdout.write(f"{replica.pid}\\n")  # `print` may make two writes, with that of the worker between them
sys.stdout.flush()
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
WORKER = f"""
{ALONE}
import sys, time
from hybridrl.rollout.vllm.parent_watch import end_with_owner
end_with_owner()
sys.stdout.write("watching\\n")
sys.stdout.flush()
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
        pid, watching = sorted(adopter.stdout.readline() for _ in range(2))
        assert watching == "watching\n"
        replica = psutil.Process(int(pid))
        below = replica.children(recursive=True)
        assert len(below) == (2 if processes == "core and worker" else 1)
        replica.kill()
        deadline = time.monotonic() + 60
        while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in below):
            assert time.monotonic() < deadline, below
            time.sleep(0.05)
        assert adopter.poll() is None
        adopter.kill()


# A replica as `VLLMEngine.start` prepares it, with a child that makes a socket and a segment as vLLM does.
LEAVES_FILES = f"""
{ALONE}
import os, subprocess, sys, time
from hybridrl.rollout.vllm import leftovers
from hybridrl.rollout.vllm.parent_watch import OWNER_VARIABLE
os.environ[OWNER_VARIABLE] = str(os.getpid())
folder = leftovers.make_folder()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
segment = child.stdout.readline().strip()
leftovers.note_segments(folder)
print(folder, segment, child.pid, flush=True)
sys.stdin.read()
child.kill()
child.wait()
leftovers.remove(folder)
"""
CHILD = f"""
{ALONE}
import os, socket, time
from multiprocessing import resource_tracker, shared_memory
from hybridrl.rollout.vllm.parent_watch import end_with_owner
end_with_owner()
segment = shared_memory.SharedMemory(create=True, size=1000)
resource_tracker.unregister(segment._name, "shared_memory")
socket.socket(socket.AF_UNIX).bind(os.environ["VLLM_RPC_BASE_PATH"] + "/a-socket")
print(f"/dev/shm/{{segment.name}}", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there is no pidfd here, and so no watching")
@pytest.mark.parametrize("end", ["orderly", "killed"])
def test_sockets_and_segments_go_with_the_replica(end: str, tmp_path: Path) -> None:
    foreign = shared_memory.SharedMemory(create=True, size=1000)  # the trainer's, for instance
    try:
        with subprocess.Popen(
            [sys.executable, "-c", LEAVES_FILES, CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        ) as replica:
            assert replica.stdout is not None and replica.stdin is not None
            folder, segment, _ = replica.stdout.readline().split()
            assert os.path.exists(segment) and Path(folder).parent == tmp_path
            assert sorted(os.listdir(folder)) == ["a-socket", "segments"]
            replica.stdin.close() if end == "orderly" else replica.kill()
        deadline = time.monotonic() + 60
        while os.path.exists(segment) or list(tmp_path.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert os.path.exists(f"/dev/shm/{foreign.name}")
    finally:
        foreign.close()
        foreign.unlink()
