"""Forks Ray workers and programs of the tests from a process that has imported what they import.

A process that starts by itself spends five seconds of processor time on importing torch and transformers, and most
tests that use Ray need a few. Everything else about a worker stays Ray's: command line, environment, log files.

`running` runs a server for the workers of this process's Ray. `programs` runs a server for whole programs and the
workers of their Rays. `fork_client.py` asks for a process and stands for it. A server ends with the process that
started it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ADDRESS = "HYBRIDRL_TEST_FORK_SERVER"
SETUP_WORKER = "HYBRIDRL_TEST_SETUP_WORKER"  # Ray's own program
STAND_IN = """#!/bin/sh
case "$1" in
    -m | *.py) {name}={address} exec {python} -I -S {client} --program "$@" ;;
    *) exec {python} "$@" ;;
esac
"""
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
# Programs and their workers, which import the rest themselves.
OF_PROGRAMS = (
    "hydra",
    "rich.console",
    "omegaconf",
    "safetensors.torch",
    "transformers.models.auto.configuration_auto",
    "hybridrl.config",
)
# Ray reads its settings, the cluster's token among them, when it is imported.
WITH_RAYS_ENVIRONMENT = (
    "ray._private.workers.default_worker",
    "hybridrl.workers.actor_rollout_ref",
    "hybridrl.workers.critic",
)


@contextmanager
def running(folder: Path) -> Iterator[None]:
    """Ray, started in the block, has its workers from a server, whose socket is in `folder` (a short path).

    Who connects waits until the imports are done. The server ends with the block, or with this process.
    """
    from ray._private import ray_constants, workers  # the server itself imports Ray later

    with _server(folder / f"fork-{os.getpid()}", "workers") as address:
        os.environ[ADDRESS] = address
        os.environ.setdefault(SETUP_WORKER, str(Path(workers.__path__[0]) / ray_constants.SETUP_WORKER_FILENAME))
        ray_constants.SETUP_WORKER_FILENAME = str(CLIENT)  # Ray appends it to its own folder: a whole path wins
        yield


@contextmanager
def programs(folder: Path) -> Iterator[str]:
    """Run a server for programs, and for the workers of the Ray that each of them starts.

    Yields:
        A Python: `-m MODULE ...` and `FILE.py ...` are forked, everything else is run by the Python that runs this.
    """
    with _server(folder / f"programs-{os.getpid()}", "programs") as address:
        python = folder / "bin" / "python"
        python.parent.mkdir()
        python.write_text(STAND_IN.format(name=ADDRESS, address=address, python=sys.executable, client=CLIENT))
        python.chmod(0o755)
        yield str(python)


@contextmanager
def _server(path: Path, kind: str) -> Iterator[str]:
    with socket.socket(socket.AF_UNIX) as listener, open(path.with_suffix(".log"), "w") as log:
        listener.bind(str(path))
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(listener.fileno()), kind],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    try:
        yield str(path)
    finally:
        server.communicate()
        os.unlink(path)


@dataclass
class Request:
    """The process that a test or Ray asks for."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    streams: list[int]

    @property
    def is_program(self) -> bool:
        """`--program -m MODULE ...` or `--program FILE ...`, in contrast to a worker."""
        return self.words[0] == "--program"


@dataclass
class Child:
    """A forked process, and the client that stands for it."""

    pid: int
    handle: int
    client: socket.socket


def serve(listener: socket.socket, kind: str) -> Request | None:
    """Fork for every client, until the standard input is closed.

    Args:
        listener: where clients connect.
        kind: "workers" of one Ray, which is imported with its first worker's environment; or "programs", each of which
            imports Ray with its own, and so do its workers.

    Returns:
        In a forked process what it is to become; None in the server.
    """
    for name in (*PRELOADED, *(OF_PROGRAMS if kind == "programs" else ())):
        importlib.import_module(name)
    if kind == "programs":
        assert "ray" not in sys.modules, "Ray was imported before the environment of a program was known"
        _settle()
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
                if kind == "workers":
                    _finish_imports(request)
                pid = os.fork()
                if pid == 0:
                    for file in (listener, selector, client, *(child.client for child in children.values())):
                        file.close()
                    for child in children.values():
                        os.close(child.handle)
                    if "numpy.random" in sys.modules:  # Python's own generator is seeded anew by fork
                        sys.modules["numpy"].random.seed()
                    return request
                with contextlib.suppress(OSError):
                    client.sendall(pid.to_bytes(8, "big"))
                for stream in request.streams:
                    os.close(stream)
                child = Child(pid, os.pidfd_open(pid), client)
                children[pid] = child
                selector.register(child.handle, selectors.EVENT_READ, child)
                selector.register(client, selectors.EVENT_READ, child)
            elif key.data.pid not in children:
                continue  # it ended in the same moment as its client
            elif key.fileobj is key.data.client:  # the client was killed, and so is the process that it stands for
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
    _settle()


def _settle() -> None:
    """Make forks cheap; a thread would be missing in them."""
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


def enter(request: Request) -> None:
    """Give a forked process the environment, the folder and the streams that were asked for."""
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.folder)
    multiprocessing.process.ORIGINAL_DIR = request.folder  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(request.environment)


def become_program(request: Request) -> None:
    """Do in a forked process what Python does with these words; the workers of its Ray are forked as well."""
    os.setsid()
    enter(request)
    atexit.register(gc.unfreeze)  # as the last of all
    sys.meta_path.insert(0, ForkRaysWorkers())
    if request.words[1] == "-m":
        sys.argv = request.words[2:]
        sys.path[:1] = [request.folder, *python_path()]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = request.words[1:]
        file = os.path.abspath(sys.argv[0])
        sys.path[:1] = [os.path.dirname(file), *python_path()]
        runpy.run_path(file, run_name="__main__")


def python_path() -> list[str]:
    """Return the folders that the environment puts before those that this process had at its start."""
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


class ForkRaysWorkers:
    """Sets what Ray starts as a worker as soon as Ray is imported, which is up to the program."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "ray._private.ray_constants":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            assert spec.origin is not None
            own = Path(spec.origin).parent / "workers" / module.SETUP_WORKER_FILENAME
            os.environ[SETUP_WORKER] = str(own)
            module.SETUP_WORKER_FILENAME = str(CLIENT)  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def become_worker(request: Request) -> tuple[CodeType, dict[str, Any]]:
    """Do in a forked process what Ray's `setup_worker.py` does, except that no other Python is started.

    Returns:
        The worker's program and its module's names. The caller runs it, so that stacks are as deep as a worker's own.
    """
    os.setpgid(0, 0)  # as Ray does: with a worker it ends the worker's process group
    enter(request)  # before Ray is imported, which reads it
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    own, sys.argv = parser.parse_known_args(request.words)
    context = RuntimeEnvContext.deserialize(own.serialized_runtime_env_context or "{}")
    update_envs(context.env_vars)
    program = sys.argv[0]
    sys.path[:1] = [os.path.dirname(program), *python_path()]
    module = ModuleType("__main__")
    module.__file__ = program
    sys.modules["__main__"] = module
    return compile(Path(program).read_text(), program, "exec"), module.__dict__


if __name__ == "__main__":
    asked = serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
    if asked is not None and asked.is_program:
        become_program(asked)
    elif asked is not None:
        exec(*become_worker(asked))
