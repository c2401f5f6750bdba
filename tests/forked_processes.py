"""Processes of the tests that are forked with their imports done: what tests and fixtures call.

`tests/fork_server.py` is the process that forks them. One of it, the base, serves all processes that run tests. It
forks programs, children of programs, gloo ranks, the processes of pytest-xdist, and servers with more imports: one for
programs that find Ray imported, and one for the workers of each Ray. The processes of inference engines come from
servers of their own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fork_client import settings_of_ray
from fork_server import (
    ADDRESS,
    AGENTS_WATCH_A_PIPE,
    CHILDREN,
    CLIENT,
    DAEMONS,
    ENGINES,
    PRESTART,
    SERVER,
    SETUP_WORKER,
    WITHOUT_RAY,
)

#: not one of the scripts below, which `sys.executable` is in a forked process
PYTHON = os.environ.setdefault("HYBRIDRL_TEST_PYTHON", sys.executable)
BASE = "HYBRIDRL_TEST_FORK_BASE"  # the folder of the base that runs
STARTED = "engines-started"  # a file: while it is there, engines are started as they are without a server
#: Scripts that stand for Python. A client needs no packages: without them Python starts in a quarter of the time.
OF_CLIENTS = """case "$1" in
    */fork_client.py) exec {python} -I -S "$@" ;;
esac
"""
#: Programs, and Ray's own processes in Python:
OF_PROGRAMS = """[ "$1" = -u ] && shift  # what `torchrun` says; output is unbuffered in tests as it is
case "$1" in
    -m | *.py) {settings} exec {python} -I -S {client} --program "$@" ;;
esac
"""
#: children of the library that import Ray:
OF_SERVERS = """case "$*" in
    *hybridrl.serve.server_child*)
        [ "$1" = -u ] && shift
        {settings} exec {python} -I -S {client} --program "$@" ;;
esac
"""
#: its other children, and those of multiprocessing and pytest-xdist:
OF_CHILDREN = """case "$*" in
    *hybridrl.utils.agent_host* | *forecast.megatron_process* | *multiprocessing.forkserver* | *sys.stdin.readline*)
        [ "$1" = -u ] && shift
        {settings} exec {python} -I -S {client} --program "$@" ;;
esac
"""
#: and processes of inference engines.
OF_ENGINES = """[ -e {started} ] || case "$*" in
    *spawn_main* | *hybridrl.rollout.sglang.sglang_child*)
        [ "$1" = -u ] && shift
        {settings} exec {python} -I -S {client} --program "$@" ;;
esac
"""


@contextmanager
def base(folder: Path, shared: bool = True) -> Iterator[Path]:
    """The base whose folder the environment names, or else a new one in `folder`, which ends with the block.

    Args:
        shared: take the one that there is. Processes of another have another hash seed.
    """
    if shared and BASE in os.environ:
        yield Path(os.environ[BASE])
        return
    bare, with_ray = folder / "base", folder / "base-ray"
    settings = {ADDRESS: str(with_ray), WITHOUT_RAY: str(bare), AGENTS_WATCH_A_PIPE: "1", PRESTART: "0"}
    own = {BASE: str(folder), CHILDREN: _stand_in(folder / "children", *_children(folder))}
    _stand_in(folder / "programs", (OF_PROGRAMS, settings | own))
    environment = os.environ | settings | own | {DAEMONS: _stand_in(folder / "daemons", (OF_PROGRAMS, settings))}
    with_ray.with_suffix(".json").write_text(json.dumps(settings_of_ray(environment)))
    before = {name: os.environ.get(name) for name in own}
    with _server("base", bare, with_ray, environment=environment):
        if shared:
            os.environ.update(own)
        try:
            yield folder
        finally:
            for name, value in before.items() if shared else ():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def programs(folder: Path, shared: bool = True) -> Iterator[str]:
    """A Python: `-m MODULE ...` and `FILE.py ...` are forked, everything else is run by the Python that runs this.

    Args:
        folder: see `base`, as for `shared`.
    """
    with base(folder, shared) as found:
        yield str(found / "programs" / "python")


@contextmanager
def running(folder: Path, with_engines: bool = False) -> Iterator[None]:
    """Ray, started in the block, has its workers from a server, and what they start as engines from another.

    Args:
        folder: of the sockets (a short path), and of a base where there is none.
        with_engines: workers may be replicas, and have what those import before they start an engine.
    """
    from ray._private import ray_constants, workers  # the server itself imports Ray later

    workers_of, engines_of = folder / f"fork-{os.getpid()}", folder / f"engines-{os.getpid()}"
    kind = "replicas" if with_engines else "workers"
    with base(folder) as found, _forked_server(found, kind, workers_of), _server("engines", engines_of):
        os.environ[ADDRESS] = str(workers_of)
        os.environ[ENGINES] = _stand_in(
            folder / f"bin-{os.getpid()}",
            *_children(found),
            (OF_ENGINES, {ADDRESS: str(engines_of)}),
        )
        os.environ.setdefault(SETUP_WORKER, str(Path(workers.__path__[0]) / ray_constants.SETUP_WORKER_FILENAME))
        ray_constants.SETUP_WORKER_FILENAME = str(CLIENT)  # Ray appends it to its own folder: a whole path wins
        yield


@contextmanager
def started_engines(folder: Path) -> Iterator[None]:
    """Engines of this block are started, not forked: for tests of who ends with whom."""
    (folder / STARTED).touch()
    try:
        yield
    finally:
        (folder / STARTED).unlink()


def _children(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Cases of children that the base of this folder forks."""
    for text, name in ((OF_SERVERS, "base-ray"), (OF_CHILDREN, "base")):
        yield text, {ADDRESS: str(folder / name), WITHOUT_RAY: str(folder / name)}


def _stand_in(folder: Path, *cases: tuple[str, dict[str, str]]) -> str:
    """Write a script that stands for Python, and return its path.

    Args:
        cases: what is forked, and which variables say by whom; everything else is run by this Python.
    """
    folder.mkdir(exist_ok=True)
    python = folder / "python"
    facts = {"python": PYTHON, "client": CLIENT, "started": folder.parent / STARTED}
    texts = (
        text.format(settings=" ".join(f"{name}={value}" for name, value in settings.items()), **facts)
        for text, settings in ((OF_CLIENTS, {}), *cases)
    )
    python.write_text("".join(["#!/bin/sh\n", *texts, f'exec {PYTHON} "$@"\n']))
    python.chmod(0o755)
    return str(python)


@contextmanager
def _listening(*paths: Path) -> Iterator[list[int]]:
    """Numbers of the files of sockets that listen there."""
    with ExitStack() as here:
        listeners = [here.enter_context(socket.socket(socket.AF_UNIX)) for _ in paths]
        for listener, path in zip(listeners, paths, strict=True):
            listener.bind(str(path))
            listener.listen(64)
        yield [listener.fileno() for listener in listeners]


@contextmanager
def _server(kind: str, *paths: Path, environment: dict[str, str] | None = None) -> Iterator[None]:
    """A server that is started. Who connects waits until its imports are done. It ends with the block."""
    with _listening(*paths) as files, open(paths[0].with_suffix(".log"), "w") as log:
        server = subprocess.Popen(
            [PYTHON, str(Path(__file__).with_name("fork_server.py")), kind, *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=files,
            start_new_session=True,
            env=environment,
        )
    try:
        yield
    finally:
        server.communicate()
        for path in paths:
            os.unlink(path)


@contextmanager
def _forked_server(base_folder: Path, kind: str, path: Path) -> Iterator[None]:
    """A server that the base forks. It ends with the block, or with this process."""
    request = {"words": [SERVER, kind], "environment": {}, "folder": "", "numbers": [1, 2]}
    text = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        with _listening(path) as files, open(path.with_suffix(".log"), "w") as log:
            connection.connect(str(base_folder / "base"))
            socket.send_fds(connection, [len(text).to_bytes(8, "big")], [log.fileno(), log.fileno(), *files])
            connection.sendall(text)
        try:
            yield
        finally:
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)  # it has ended
            os.unlink(path)
