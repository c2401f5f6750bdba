"""What Ray calls in place of its `setup_worker.py`: the worker is forked by the server, and this process stands for it.

It imports next to nothing: a worker that is forked costs a tenth of one that is started. A runtime environment that
acts before Python's first import (`PYTHONPATH`, another executable) gets Ray's own program and a process of its own.
"""

import json
import os
import signal
import socket
import sys


def needs_its_own_python(words: list[str]) -> bool:
    """Whether the runtime environment among Ray's words has effects that a forked process cannot have."""
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value or words[place + 1])
            other_python = context.get("py_executable") not in (None, sys.executable)
            special = context.get("command_prefix") or context.get("override_worker_entrypoint")
            return bool(other_python or special or "PYTHONPATH" in (context.get("env_vars") or {}))
    return False


def main() -> None:
    if needs_its_own_python(sys.argv[1:]):
        os.execv(sys.executable, [sys.executable, os.environ["HYBRIDRL_TEST_SETUP_WORKER"], *sys.argv[1:]])
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
