"""What Ray calls in place of its `setup_worker.py`: the worker is forked by the server, and this process stands for it.

It imports next to nothing: a worker that is forked costs a tenth of one that is started.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    request = json.dumps({"words": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ["HYBRIDRL_TEST_FORK_SERVER"])
        socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(request)
        answer = server.recv(8, socket.MSG_WAITALL)  # once the worker has ended
    status = int.from_bytes(answer, "big") if len(answer) == 8 else 1 << 8
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
