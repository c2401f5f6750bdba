"""Forks the workers of the tests' Ray from a process that has imported what they import.

A worker that starts by itself spends six seconds of processor time on importing torch and transformers, and most tests
that use Ray need a few. Everything else about a worker stays Ray's: command line, environment, log files.

`running` runs the server; `fork_client.py` asks it for a worker. The server ends with the process that started it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ADDRESS = "HYBRIDRL_TEST_FORK_SERVER"
SETUP_WORKER = "HYBRIDRL_TEST_SETUP_WORKER"  # Ray's own program
CLIENT = Path(__file__).with_name("fork_client.py")

# Nothing here may start a thread (pyarrow does): a fork would lose it.
PRELOADED = (
    "torch",
    "torch.distributed.tensor",
    "tensordict",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
)
# Ray reads its settings, the cluster's token among them, when it is imported.
WITH_RAYS_ENVIRONMENT = (
    "ray._private.workers.default_worker",
    "hybridrl.workers.actor_rollout_ref",
    "hybridrl.workers.critic",
)


@contextmanager
def running(folder: Path) -> Iterator[None]:
    """Ray, started in the block, has its workers from the server, whose socket is in `folder` (a short path).

    Who connects waits until the imports are done. The server ends with the block, or with this process.
    """
    from ray._private import ray_constants, workers  # the server itself imports Ray later

    path = folder / f"fork-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener, open(path.with_suffix(".log"), "w") as log:
        listener.bind(str(path))
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    os.environ[ADDRESS] = str(path)
    os.environ.setdefault(SETUP_WORKER, str(Path(workers.__path__[0]) / ray_constants.SETUP_WORKER_FILENAME))
    ray_constants.SETUP_WORKER_FILENAME = str(CLIENT)  # Ray appends it to its own folder: a whole path wins
    try:
        yield
    finally:
        server.communicate()
        os.unlink(path)


@dataclass
class Request:
    """The process that Ray asks for."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    streams: list[int]


@dataclass
class Child:
    """A worker, and the client that stands for it."""

    pid: int
    handle: int
    client: socket.socket


def serve(listener: socket.socket) -> Request | None:
    """Fork for every client, until the standard input is closed.

    Returns:
        In a forked process what it is to become; None in the server.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    children: dict[int, Child] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                for child in children.values():
                    os.kill(child.pid, signal.SIGKILL)
                return None
            if key.fileobj is listener:
                client, _ = listener.accept()
                request = _received(client)
                if request is None:
                    continue
                _finish_imports(request)
                pid = os.fork()
                if pid == 0:
                    return request
                for stream in request.streams:
                    os.close(stream)
                child = Child(pid, os.pidfd_open(pid), client)
                children[pid] = child
                selector.register(child.handle, selectors.EVENT_READ, child)
                selector.register(client, selectors.EVENT_READ, child)
            elif key.data.pid not in children:
                continue  # it ended in the same moment as its client
            elif key.fileobj is key.data.client:  # the client was killed, and so is its worker
                selector.unregister(key.data.client)
                os.kill(key.data.pid, signal.SIGKILL)
            else:
                _ended(children.pop(key.data.pid), selector)


def _received(client: socket.socket) -> Request | None:
    """What the client asks for; None where it has gone already."""
    size, streams, _, _ = socket.recv_fds(client, 8, 3)
    text = client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    if len(size) < 8 or len(text) < int.from_bytes(size, "big"):
        return None
    return Request(**json.loads(text), streams=streams)


def _finish_imports(request: Request) -> None:
    """Import Ray as its first worker would."""
    if "ray" in sys.modules:
        return
    os.environ.update(request.environment)
    for name in WITH_RAYS_ENVIRONMENT:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread"
    gc.collect()
    gc.freeze()


def _ended(child: Child, selector: selectors.BaseSelector) -> None:
    _, status = os.waitpid(child.pid, 0)
    with contextlib.suppress(OSError):
        child.client.sendall(status.to_bytes(8, "big"))
    for file in (child.handle, child.client):
        with contextlib.suppress(KeyError):
            selector.unregister(file)
    os.close(child.handle)
    child.client.close()


def become(request: Request) -> tuple[CodeType, dict[str, Any]]:
    """Do in a forked process what Ray's `setup_worker.py` does, except that no other Python is started.

    Returns:
        The worker's program and its module's names. The caller runs it, so that stacks are as deep as a worker's own.
    """
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs

    os.setpgid(0, 0)  # as Ray does: with a worker it ends the worker's process group
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.folder)
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    own, sys.argv = parser.parse_known_args(request.words)
    context = RuntimeEnvContext.deserialize(own.serialized_runtime_env_context or "{}")
    os.environ.clear()
    os.environ.update(request.environment)
    update_envs(context.env_vars)
    program = sys.argv[0]
    sys.path[0] = os.path.dirname(program)
    module = ModuleType("__main__")
    module.__file__ = program
    sys.modules["__main__"] = module
    return compile(Path(program).read_text(), program, "exec"), module.__dict__


if __name__ == "__main__":
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        exec(*become(asked))
