"""Ranks of a gloo group for tests without Ray: processes that are forked with their imports done."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from fork_server import CHILDREN

PRELOADED = (
    "torch.distributed.fsdp",
    "tensordict",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "hybridrl.engine.fsdp.engine",
)
_forks_from: list[tuple[str, ...]] = []  # what the server that runs has imported


def spawn(body: Callable[..., None], world: int, *arguments: Any, preload: str = "") -> None:
    """Run `body(rank, *arguments)` in `world` processes of one gloo group; a failure in one fails the test.

    Args:
        preload: a module of the tests with other imports that take long. Modules are imported once, in the process that
            the ranks are forks of; tests with another `preload` start another.
    """
    port = _free_port()
    _start_server((preload,) if preload else PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(
                _enter, args=(body, world, port, Path(folder), arguments), nprocs=world, start_method="forkserver"
            )
        except Exception as error:
            # gloo aborts a rank whose peer is gone, and that rank may be the one reported: show what each one raised.
            raised = [f"{file.name}:\n{file.read_text(encoding='utf-8')}" for file in sorted(Path(folder).iterdir())]
            raise AssertionError("\n".join([str(error), *raised])) from error


def _free_port() -> int:
    """A port that stays free while the ranks' process imports: none that the kernel or Ray give to whoever asks."""
    ports = random.SystemRandom().sample(range(20_000, 32_000), 100)
    for port in ports:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port of {ports} is free")


def _start_server(modules: tuple[str, ...]) -> None:
    """Start the process that the ranks are forks of, unless it runs; it gets the folders of tests by `PYTHONPATH`."""
    if _forks_from != [modules]:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        _forks_from[:] = [modules]
    before = os.environ["PYTHONPATH"]
    own = [path for path in sys.path if path.startswith(str(Path(__file__).parent))]
    os.environ["PYTHONPATH"] = os.pathsep.join([*own, before])
    try:
        multiprocessing.set_forkserver_preload([*modules, "frozen_imports"])
        multiprocessing.set_executable(os.environ.get(CHILDREN, sys.executable))  # forked, if there is a base
        forkserver.ensure_running()
    finally:
        multiprocessing.set_executable(sys.executable)
        os.environ["PYTHONPATH"] = before


def _enter(
    rank: int, body: Callable[..., None], world: int, port: int, folder: Path, arguments: tuple[Any, ...]
) -> None:
    from hybridrl.utils import distributed

    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    distributed.init_process_group(rank, world, "127.0.0.1", port, timeout_seconds=120)
    try:
        body(rank, *arguments)
    except BaseException:
        (folder / f"rank_{rank}").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    distributed.destroy_process_group()
