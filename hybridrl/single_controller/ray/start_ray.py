"""Starts Ray, and waits for it as long as it gets on.

Ray gives its own processes 30 s, which is too short where the machine is busy. Here the two places where it counts them
ask again, until nothing has moved for a while. The raylet counts, too: its workers get ten minutes, and where it has
ended because its agent was late, which no setting changes, Ray is started once more.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import node as ray_node
from ray._private import ray_constants, services
from ray._private import utils as ray_utils

from hybridrl.errors import PlacementError
from hybridrl.notify import notify
from hybridrl.utils.movement import Movement, StartWatch

_LOOK_S = 0.5
_END_S = 10.0
_ASK_MS = 500
_NEEDED = ("gcs_server", "raylet")
_CHATTY = ("monitor.",)  # the autoscaler writes every 5 s that it waits
#: what the raylet reads at its start, for its workers (60 s); the user's own value stays
_PATIENCE_OF_RAYLET = {"RAY_worker_register_timeout_seconds": "600"}
_TRIES = 3
_LATE_AGENT = "Timed out waiting for file"


def start_ray(**options: Any) -> None:
    """Call `ray.init`; where it starts Ray here, wait as long as its processes get on.

    Raises:
        PlacementError: nothing moved for a while, or one of its processes ended; the message has the end of the log.
    """
    if options.get("address") != "local":
        ray.init(**options)
        return
    for tries_left in reversed(range(_TRIES)):
        try:
            _start(options)
            return
        except _GivenUpError as error:
            if not (tries_left and error.late_agent):
                raise PlacementError(str(error)) from error
            notify("Ray's raylet has ended because its agent did not start within 30 s: starting Ray again", "warning")


def _start(options: dict[str, Any]) -> None:
    """Try it once; what has started by then ends if it fails."""
    before = _rays_processes()
    try:
        with _Patience(before).inside_ray():
            ray.init(**options)
    except _GivenUpError:
        started = _rays_processes() - before
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        # Those that ended by themselves are waited for, too: as zombies they would be taken for those of the next try.
        psutil.wait_procs([*started, *_ended_children(before)], timeout=_END_S)
        raise


class _GivenUpError(Exception):
    """Ray does not start. No RuntimeError, which Ray would catch and try again.

    Attributes:
        late_agent: whether the raylet ended because it had waited for its agent.
    """

    def __init__(self, message: str, late_agent: bool) -> None:
        super().__init__(message)
        self.late_agent = late_agent


@contextlib.contextmanager
def keeping_stop_signals() -> Iterator[None]:
    """Within the block, Ray leaves SIGTERM to this program, in every thread.

    The handler of failures of Ray's core counts SIGTERM as one: it prints a stack and sets an alarm that aborts the
    process after 3 s, whatever the program's own handler does. Without it a crash of the core in this process shows no
    stack of C++, but that of Python's faulthandler, which Ray turns on. In the main thread Ray also has a handler of
    its own, which exits with status 15: it is for programs that have none.
    """
    before, set_handler = ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER, ray_utils.set_sigterm_handler
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = before
        ray_utils.set_sigterm_handler = set_handler


class _Patience:
    """Waits in place of Ray."""

    def __init__(self, before: set[psutil.Process]) -> None:
        self._before = before

    @contextlib.contextmanager
    def inside_ray(self) -> Iterator[None]:
        """Within the context, Ray's questions for its GCS and its raylet are answered when these are ready."""
        get_node, wait_for_port = services.get_node, ray_node.wait_for_persisted_port
        added = {name: value for name, value in _PATIENCE_OF_RAYLET.items() if name not in os.environ}

        def node(*args: Any, **named: Any) -> Any:
            return self._ask(lambda: get_node(*args, **named), "its raylet to register")

        def port(*args: Any, **named: Any) -> Any:
            if named.get("timeout_ms") == 0:
                return wait_for_port(*args, **named)
            return self._ask(lambda: wait_for_port(*args, **{**named, "timeout_ms": _ASK_MS}), "its GCS to listen")

        services.get_node, ray_node.wait_for_persisted_port = node, port
        os.environ.update(added)
        try:
            yield
        finally:
            services.get_node, ray_node.wait_for_persisted_port = get_node, wait_for_port
            for name in added:
                os.environ.pop(name, None)

    def _ask(self, question: Callable[[], Any], goal: str) -> Any:
        movement = Movement(self._own, lambda: _logs_of(self._own()), chatty=_CHATTY)
        watch = StartWatch(f"Ray: {goal}", movement)
        while True:
            try:
                return question()
            except Exception as error:  # Ray raises RuntimeErrors and others for what is not there yet
                still, ended = watch.why_given_up(), self._ended()
                if still or ended:
                    why = f"{' and '.join(ended)} ended" if ended else str(still)
                    checks = _failed_checks(_logs_of(self._own())) if ended else ""
                    if checks:
                        why += f" by itself: {checks}"
                    raise _GivenUpError(
                        f"Ray did not start here: after {watch.waited_s:.0f} s of waiting for {goal} {why} ({error}). "
                        "Join a cluster that runs (`ray start --head`), or try again when the machine is less busy"
                        f"{movement.last_lines(of=ended)}",
                        late_agent=_LATE_AGENT in checks,
                    ) from error
            time.sleep(_LOOK_S)

    def _own(self) -> set[psutil.Process]:
        return _rays_processes() - self._before

    def _ended(self) -> list[str]:
        """Names of Ray's processes that started and ended."""
        return [child.name() for child in _ended_children(self._before)]


def _ended_children(before: set[psutil.Process]) -> list[psutil.Process]:
    """Return Ray's processes that started here and ended; they are children that nobody has waited for."""
    ended = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child not in before and child.status() == psutil.STATUS_ZOMBIE and child.name() in _NEEDED:
                ended.append(child)
    return ended


def _rays_processes() -> set[psutil.Process]:
    """Return the processes that `ray.init` started here and their children; all name the session folder."""
    processes = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any(f"{os.sep}session_" in word for word in process.cmdline()):
                processes.add(process)
    return processes


def _logs_of(processes: Iterable[psutil.Process]) -> Path | None:
    """Return the folder of logs of the session that processes of Ray name; other sessions may start next to it."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for word in process.cmdline():
                session = re.search(rf"[^=]*{os.sep}session_\d[^{os.sep}]*", word)
                if session:
                    return Path(session[0], "logs")
    return None


def _failed_checks(logs: Path | None) -> str:
    """Return why the raylet has ended itself, from its log."""
    try:
        return " ".join(re.findall("Check failed: .*", Path(logs or "", "raylet.out").read_text(errors="replace")))
    except OSError:
        return ""
