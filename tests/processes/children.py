"""Programs that tests start as children of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from hybridrl.processes.child import end_with_run
from hybridrl.processes.frames import FrameConnection
from hybridrl.processes.supervisor import split_off


def main(connection_fd: int, life_fd: int, *more: int) -> None:
    """Tell the run which processes there are, and do then what it says."""
    connection = FrameConnection(connection_fd)
    task = bytes(connection.receive()).decode()
    if task.startswith("supervised"):
        split_off(life_fd, close=(connection_fd, *more))
    else:
        end_with_run(life_fd)
    words = [sys.executable, "-c", "import time; time.sleep(1000)"]
    below = [subprocess.Popen(words)]
    if task.startswith("supervised"):
        below.append(subprocess.Popen(words, start_new_session=True))
    connection.send(" ".join(str(pid) for pid in [os.getpid(), *(program.pid for program in below)]).encode())
    if task.endswith("stops"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if task.endswith("ends"):
        sys.exit(3)
    time.sleep(1000)
