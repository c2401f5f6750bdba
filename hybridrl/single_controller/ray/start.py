"""Starts Ray, and waits for it as long as it gets on.

Ray gives its own processes 30 s, which is too short where the machine is busy. Here the two places where it counts them
ask again, until nothing has moved for a while.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import node as ray_node
from ray._private import services

from hybridrl.errors import PlacementError
from hybridrl.notify import notify
from hybridrl.utils.movement import Movement

_STILL_S = 30.0  # without any movement, the start is given up
_TELL_S = 30.0  # a start that takes this long is mentioned, and again each time it has taken as long
_LOOK_S = 0.5
_END_S = 10.0
_ASK_MS = 500
_NEEDED = ("gcs_server", "raylet")


def start_ray(**options: Any) -> None:
    """Call `ray.init`; where it starts Ray here, wait as long as its processes get on.

    Raises:
        PlacementError: nothing moved for a while, or one of its processes ended; the message has the end of the log.
    """
    if options.get("address") != "local":
        ray.init(**options)
        return
    before = _rays_processes()
    waiting = _Patience(before)
    try:
        with waiting.inside_ray():
            ray.init(**options)
    except _GivenUpError as error:
        left = _rays_processes() - before
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_END_S)
        raise PlacementError(str(error)) from error


class _GivenUpError(Exception):
    """Ray does not start. No RuntimeError, which Ray would catch and try again."""


class _Patience:
    """Waits in place of Ray."""

    def __init__(self, before: set[psutil.Process]) -> None:
        self._before = before

    @contextlib.contextmanager
    def inside_ray(self) -> Iterator[None]:
        """Within the context, Ray's questions for its GCS and its raylet are answered when these are ready."""
        get_node, wait_for_port = services.get_node, ray_node.wait_for_persisted_port

        def node(*args: Any, **named: Any) -> Any:
            return self._ask(lambda: get_node(*args, **named), "its raylet to register")

        def port(*args: Any, **named: Any) -> Any:
            if named.get("timeout_ms") == 0:
                return wait_for_port(*args, **named)
            return self._ask(lambda: wait_for_port(*args, **{**named, "timeout_ms": _ASK_MS}), "its GCS to listen")

        services.get_node, ray_node.wait_for_persisted_port = node, port
        try:
            yield
        finally:
            services.get_node, ray_node.wait_for_persisted_port = get_node, wait_for_port

    def _ask(self, question: Callable[[], Any], what: str) -> Any:
        movement: Movement | None = None
        told_s = _TELL_S
        while True:
            try:
                return question()
            except Exception as error:  # Ray raises RuntimeErrors and others for what is not there yet
                if movement is None:
                    movement = Movement(lambda: _rays_processes() - self._before, _newest_logs())
                still, waited_s = movement.still_s(), time.monotonic() - movement.began
                ended = self._ended()
                if still > _STILL_S or ended:
                    why = f"{' and '.join(ended)} ended" if ended else f"nothing has moved for {still:.0f} s"
                    raise _GivenUpError(
                        f"Ray did not start here: after {waited_s:.0f} s of waiting for {what} {why} ({error}). Join a "
                        "cluster that runs (`ray start --head`), or try again when the machine is less busy"
                        f"{movement.last_lines()}"
                    ) from error
                if waited_s > told_s:
                    told_s *= 2
                    notify(
                        f"Ray is still starting: waiting for {what} for {waited_s:.0f} s ({movement.count} processes; "
                        f"the last sign of progress {still:.0f} s ago). The run goes on waiting while something moves",
                        "warning",
                    )
            time.sleep(_LOOK_S)

    def _ended(self) -> list[str]:
        """Names of Ray's processes that started and ended; they are children that nobody has waited for."""
        ended = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child not in self._before and child.status() == psutil.STATUS_ZOMBIE and child.name() in _NEEDED:
                    ended.append(child.name())
        return ended


def _rays_processes() -> set[psutil.Process]:
    """Return the processes that `ray.init` started here and their children; all name the session folder."""
    processes = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any(f"{os.sep}session_" in word for word in process.cmdline()):
                processes.add(process)
    return processes


def _newest_logs() -> Path:
    return Path(get_default_ray_temp_dir(), "session_latest", "logs").resolve()
