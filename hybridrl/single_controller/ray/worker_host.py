"""The worker's side of a Ray worker group: an actor that builds the user's worker and runs its methods.

The actor class of a group is created at run time as a subclass of the user's class (`hosted`), so the actor has the
user's methods. A group can start all its processes at once: the constructor does nothing, rank 0 then reserves a port,
and the user's constructor runs when every rank knows that address. Only the workers take part, and the controller does
not wait for any of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import sys
import time
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayTaskError

from hybridrl.errors import UserError
from hybridrl.processes.inherited import ignore_stop_signals, keep_exit_codes
from hybridrl.protocol import DataProto
from hybridrl.single_controller.base.failures import RemoteFailure
from hybridrl.single_controller.base.worker import PortReservation, WorkerSettings, set_up_process
from hybridrl.single_controller.ray.image_references import with_images
from hybridrl.utils import work_folder

# Positional and keyword arguments of the user's constructor.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def assigned_gpus() -> str:
    """Return the GPUs that Ray assigned to this process, as CUDA_VISIBLE_DEVICES lists them.

    Ray sets that variable too, but not if RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.
    """
    return ",".join(map(str, ray.get_gpu_ids()))


class CallMetadata(NamedTuple):
    """Metadata that is returned with a method's result. It is too small to be put into the object store.

    `started` is a time of day: ranks of several machines have no other clock in common.
    """

    seconds: float
    rows: int
    started: float


class WorkerInfo(NamedTuple):
    """Location of a rank. `seconds` is the duration of its constructor."""

    seconds: float
    rank: int
    pid: int
    node: str
    node_id: str
    master_address: str
    master_port: int


class PortInUseError(UserError):
    """The port chosen for a group's process group is already in use."""


class WorkerHost:
    """Mixed in before the user's class; see the module's docstring. Names start with `_host` to avoid conflicts with
    the user's names."""

    def __init__(self) -> None:
        # The user's constructor runs in _host_build.
        self._host_settings: WorkerSettings | None = None

    def _host_reserve(self, master_port: int = 0) -> tuple[str, int]:
        """Reserve a port on rank 0's node, `master_port` or any."""
        address = ray.util.get_node_ip_address()
        try:
            self._host_port: PortReservation | PortInUseError = PortReservation(master_port)
        except OSError as error:
            # reported by _host_build, which knows the group's name
            self._host_port = PortInUseError(
                f"port {master_port} on node {address} cannot be taken for the worker group's process group: {error}. "
                "Choose another master_port, or leave it unset to get a free one"
            )
            return address, master_port
        return address, self._host_port.port

    def _host_build(self, settings: WorkerSettings, master: tuple[str, int], arguments: Arguments) -> WorkerInfo:
        """Set up the process and run the user's constructor."""
        started = time.perf_counter()
        self._host_settings = settings
        args, kwargs = arguments
        try:
            if settings.rank == 0 and isinstance(self._host_port, PortInUseError):
                raise self._host_port
            with contextlib.suppress(PermissionError):  # already leads a session, and so a process group
                os.setpgid(0, 0)  # out of reach of the terminal's Ctrl-C, with everything the worker starts
            if settings.use_gpu:
                os.environ["CUDA_VISIBLE_DEVICES"] = assigned_gpus()
            work_folder.enter(settings.folder)
            set_up_process(settings, *master)
            keep_exit_codes()
            ignore_stop_signals()
            _keep_stacks_readable()
            super().__init__(*args, **kwargs)
        except (Exception, SystemExit) as error:
            raise self._host_failure(error, "__init__") from error
        self._host_where = WorkerInfo(
            time.perf_counter() - started,
            settings.rank,
            os.getpid(),
            ray.util.get_node_ip_address(),
            ray.get_runtime_context().get_node_id(),
            *master,
        )
        return self._host_where

    def _host_info(self) -> WorkerInfo:
        """Return where this worker runs, for a group that attaches to it."""
        return self._host_where

    def _host_call(self, role: str, name: str, *args: Any, **kwargs: Any) -> tuple[Any, CallMetadata]:
        """Run one method of the worker, or of the role's worker inside a colocated one."""
        started = time.perf_counter()
        try:
            result = self._host_method(role, name)(*map(with_images, args), **_with_images(kwargs))
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
        except (Exception, SystemExit) as error:
            raise self._host_failure(error, name, role) from error
        return result, _answer(result, started)

    def _host_method(self, role: str, name: str) -> Any:
        target: Any = self.worker_dict[role] if role else self  # type: ignore[attr-defined]
        return getattr(target, name)

    def _host_failure(self, error: BaseException, method: str, role: str = "") -> RemoteFailure:
        """Return the failure to report: this rank's, or that of the worker whose output this rank was given."""
        upstream: BaseException | None = error
        while upstream is not None:
            cause = upstream.cause if isinstance(upstream, RayTaskError) else upstream
            if isinstance(cause, RemoteFailure):
                return cause
            upstream = upstream.__cause__
        settings = self._host_settings
        assert settings is not None, "a worker is called before it is built"
        return RemoteFailure.capture(
            error,
            role=role or settings.role,
            rank=settings.rank,
            world_size=settings.world_size,
            node=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            method=method,
        )

    def _host_ping(self) -> int:
        return os.getpid()


class AsyncWorkerHost(WorkerHost):
    """The host of a class with `async def` methods, whose calls overlap in one event loop."""

    async def _host_call(self, role: str, name: str, *args: Any, **kwargs: Any) -> tuple[Any, CallMetadata]:  # type: ignore[override]
        started = time.perf_counter()
        try:
            result = self._host_method(role, name)(*map(with_images, args), **_with_images(kwargs))
            if inspect.isawaitable(result):
                result = await result
        except (Exception, SystemExit) as error:
            raise self._host_failure(error, name, role) from error
        return result, _answer(result, started)


def hosted(cls: type, is_async: bool) -> type:
    """Return the class for the Ray actors: the user's `cls` with a host mixed in."""
    host = AsyncWorkerHost if is_async else WorkerHost
    return type(cls.__name__, (host, cls), {"__doc__": cls.__doc__, "__module__": cls.__module__})


def has_async_methods(cls: type) -> bool:
    """Return whether any method of the class is `async def`."""
    return any(inspect.iscoroutinefunction(member) for _, member in inspect.getmembers(cls, callable))


def _answer(result: Any, started: float) -> CallMetadata:
    seconds = time.perf_counter() - started
    return CallMetadata(seconds, len(result) if isinstance(result, DataProto) else -1, time.time() - seconds)


def _with_images(named: dict[str, Any]) -> dict[str, Any]:
    return {key: with_images(value) for key, value in named.items()}


def _keep_stacks_readable() -> None:
    """On SIGUSR1, write the stacks of all threads to the worker's log, so that a hang can be examined from outside."""
    import faulthandler

    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True, chain=False)
