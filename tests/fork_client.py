"""Asks the fork server for a process and stands for it: it forwards signals and ends with the process's status.

Ray calls it in place of its `setup_worker.py`, and the Python of the fixture `forked` calls it with `--program` and
what Python is to run. It imports next to nothing: a worker that is forked costs a tenth of one that is started. A
runtime environment with another executable gets Ray's own program and a process of its own.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys

# What Ray itself sets for its processes, or reads when it is used and not when it is imported.
READ_LATER = (
    "RAY_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_CLIENT_MODE",
    "RAY_IGNORE_UNHANDLED_ERRORS",
    "RAY_JOB_ID",
    "RAY_LD_PRELOAD_ON_WORKERS",
    "RAY_NODE_ID",
    "RAY_RAYLET_PID",
    "RAY_TMPDIR",
    "RAY_worker_register_timeout_seconds",
)
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def needs_its_own_python(words: list[str]) -> bool:
    """Return whether the runtime environment among Ray's words has effects that a forked process cannot have."""
    context = runtime_environment(words)
    other_python = context.get("py_executable") not in (None, sys.executable)
    return bool(other_python or context.get("command_prefix") or context.get("override_worker_entrypoint"))


def settings_of_ray(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that Ray reads when it is imported."""
    return {name: value for name, value in environment.items() if name.startswith("RAY_") and name not in READ_LATER}


def address_of_server(words: list[str]) -> str:
    """Return the server that forks this process.

    A program whose settings of Ray are those with which the first server has imported Ray is forked by it; all other
    programs, and the workers, by the other: a worker's core reads variables when it is imported that are its own.
    """
    address, other = os.environ["HYBRIDRL_TEST_FORK_SERVER"], os.environ.get("HYBRIDRL_TEST_FORK_SERVER_WITHOUT_RAY")
    file_of_settings = address + ".json"
    if other is None or not os.path.exists(file_of_settings):  # a server of one kind alone, such as that of engines
        return address
    with open(file_of_settings) as file:
        settings = json.load(file)
    return address if words[0] == "--program" and settings_of_ray(dict(os.environ)) == settings else other


def runtime_environment(words: list[str]) -> dict:
    """Return the runtime environment among the words of one of Ray's workers."""
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--serialized-runtime-env-context":
            return json.loads(value or words[place + 1]) or {}
    return {}


def inherited_files() -> list[int]:
    """Numbers of the open files that this process was given, as it would give them to another program."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own
            if os.get_inheritable(number):
                found.append(number)
    return sorted(found)


def wait_for(server: socket.socket, pid: bytes) -> bytes:
    """Return what the server sends once the process has ended, and forward signals to the process until then.

    SIGKILL cannot be forwarded: the server sees that this process is gone. Signals are read from a pipe, because
    Python would not call a handler for one that arrives at the moment in which a system call begins to wait.
    """
    if len(pid) == 8:
        arrived, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)
        for number in FORWARDED:
            signal.signal(number, lambda *_: None)
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(int.from_bytes(pid, "big"))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            while server not in select.select([server, arrived], [], [])[0]:
                for number in os.read(arrived, 64):
                    send(process, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    return server.recv(8, socket.MSG_WAITALL)


def send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, number)


def main() -> None:
    if needs_its_own_python(sys.argv[1:]):
        os.execv(sys.executable, [sys.executable, os.environ["HYBRIDRL_TEST_SETUP_WORKER"], *sys.argv[1:]])
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # one that arrives now waits for its handler
    numbers = inherited_files()
    address = address_of_server(sys.argv[1:])
    about = {"words": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "numbers": numbers}
    request = json.dumps(about).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(request).to_bytes(8, "big")], numbers)
        server.sendall(request)
        pid = server.recv(8, socket.MSG_WAITALL)
        if len(pid) < 8:
            print(f"{address} has ended; see the files *.log of its folder", file=sys.stderr)
        for number in numbers[3:]:  # a pipe ends for its reader when the process has closed it
            os.close(number)
        answer = wait_for(server, pid)
    status = int.from_bytes(answer, "big") if len(answer) == 8 else 1 << 8
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
