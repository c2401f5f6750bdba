"""Asks the fork server for a process and stands for it: it forwards signals and ends with the process's status.

Ray calls it in place of its `setup_worker.py`, and the Python of the fixture `forked` calls it with `--program` and
what Python is to run. It imports next to nothing: a worker that is forked costs a tenth of one that is started. A
runtime environment with another executable gets Ray's own program and a process of its own.
"""

import contextlib
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def needs_its_own_python(words: list[str]) -> bool:
    """Return whether the runtime environment among Ray's words has effects that a forked process cannot have."""
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value or words[place + 1])
            other_python = context.get("py_executable") not in (None, sys.executable)
            special = context.get("command_prefix") or context.get("override_worker_entrypoint")
            return bool(other_python or special)
    return False


def inherited_files() -> list[int]:
    """Numbers of the open files that this process was given, as it would give them to another program."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own
            if os.get_inheritable(number):
                found.append(number)
    return sorted(found)


def forward_signals(pid: int) -> None:
    """To the process that this one stands for. SIGKILL cannot be forwarded: the server sees that this one is gone."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    for number in FORWARDED:
        signal.signal(number, lambda received, _: send(process, received))


def send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, number)


def main() -> None:
    if needs_its_own_python(sys.argv[1:]):
        os.execv(sys.executable, [sys.executable, os.environ["HYBRIDRL_TEST_SETUP_WORKER"], *sys.argv[1:]])
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # one that arrives now waits for its handler
    numbers = inherited_files()
    about = {"words": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "numbers": numbers}
    request = json.dumps(about).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ["HYBRIDRL_TEST_FORK_SERVER"])
        socket.send_fds(server, [len(request).to_bytes(8, "big")], numbers)
        server.sendall(request)
        pid = server.recv(8, socket.MSG_WAITALL)
        for number in numbers[3:]:  # a pipe ends for its reader when the process has closed it
            os.close(number)
        if len(pid) == 8:
            forward_signals(int.from_bytes(pid, "big"))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        answer = server.recv(8, socket.MSG_WAITALL)  # once the process has ended
    status = int.from_bytes(answer, "big") if len(answer) == 8 else 1 << 8
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
