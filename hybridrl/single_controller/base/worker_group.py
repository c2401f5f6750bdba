"""Groups of workers as the controller sees them, independent of what runs the processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

from hybridrl.notify import notify
from hybridrl.protocol import DataProto, DataProtoFuture
from hybridrl.protocol.fields import check_fields
from hybridrl.single_controller.base.decorator import (
    MAGIC_ATTR,
    PADDING_KEY,
    Execute,
    collect_order,
)


class ResourcePool:
    """Processes on nodes.

    Args:
        process_on_nodes: number of processes on each node, e.g. `[8, 8]`.
        max_colocate_count: number of worker groups that may share a slot of the pool, each with its own process.
        n_gpus_per_node: accepted for verl's programs; it has no effect.
    """

    def __init__(
        self, process_on_nodes: list[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ) -> None:
        self._store = list(process_on_nodes or [])
        bad = [count for count in self._store if not isinstance(count, int) or count < 1]
        if bad:
            raise ValueError(
                f"process_on_nodes is {self._store}; every node needs at least one process, as a whole number"
            )
        if max_colocate_count < 1:
            raise ValueError(f"max_colocate_count is {max_colocate_count}; it must be at least 1")
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        """Add a node with `process_count` processes."""
        if process_count < 1:
            raise ValueError(f"process_count is {process_count}; a node needs at least one process")
        self._store.append(process_count)

    @property
    def world_size(self) -> int:
        """The number of processes on all nodes."""
        return sum(self._store)

    @property
    def store(self) -> list[int]:
        """The number of processes on each node."""
        return self._store

    def local_world_size_list(self) -> list[int]:
        """Return for each rank the number of processes on its node."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """Return for each rank its number on its node."""
        return [local_rank for count in self._store for local_rank in range(count)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(process_on_nodes={self._store})"


class ClassWithInitArgs:
    """A class and its constructor arguments, to be instantiated later in another process."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)


class GroupMethod:
    """A worker method as a method of the group: dispatch, run on the ranks, collect."""

    __slots__ = (
        *("__name__", "__wrapped__", "blocking", "collect_fn", "dispatch_fn", "group", "name", "rank_zero"),
        *("reads", "writes"),
    )

    def __init__(self, group: WorkerGroup, method: Callable[..., Any], name: str) -> None:
        registered = getattr(method, MAGIC_ATTR)
        mode = registered["dispatch_mode"]
        self.group = group
        self.name = name
        self.dispatch_fn = mode.dispatch_fn
        self.collect_fn = mode.collect_fn
        self.blocking = registered["blocking"]
        self.rank_zero = registered["execute_mode"] is Execute.RANK_ZERO
        self.reads: tuple[str, ...] = registered.get("reads", ())
        self.writes: tuple[str, ...] = registered.get("writes", ())
        self.__name__ = name
        self.__wrapped__ = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.reads:
            self._check_reads(args, kwargs)
        args, kwargs = self.dispatch_fn(self.group, *args, **kwargs)
        padding = kwargs.pop(PADDING_KEY, None)
        result = self.group.run_method(self, args, kwargs, padding)
        if self.writes and isinstance(result, DataProtoFuture):
            result.fields = frozenset(self.writes)
        return result

    def _check_reads(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a batch that lacks what the method reads, before anything is sent.

        Raises:
            MissingFieldError: see `hybridrl.protocol.fields.check_fields`.
        """
        for batch in (*args, *kwargs.values()):
            fields = _fields_of(batch)
            if fields is not None:
                check_fields(self.__wrapped__.__qualname__, self.reads, fields)
                return

    def __repr__(self) -> str:
        return f"<worker method {self.name} on {self.group!r}>"


def _fields_of(batch: Any) -> Collection[str] | None:
    """The fields of a batch; None for anything else, and for a future whose fields nobody declares."""
    if isinstance(batch, DataProtoFuture):
        return batch.fields
    if isinstance(batch, DataProto):
        tensors = () if batch.batch is None else batch.batch.keys()
        return {*map(str, tensors), *batch.non_tensor_batch}
    return set(map(str, batch.keys())) if isinstance(batch, TensorDict) else None


def registered_methods(cls: type) -> list[str]:
    """Return the names of a class's methods that were decorated with `register`."""
    names = []
    for name in dir(cls):
        method = getattr(cls, name, None)
        if callable(method) and hasattr(method, MAGIC_ATTR):
            names.append(name)
    return names


class WorkerGroup:
    """The ranks of one model program, as one object with the workers' registered methods.

    Args:
        resource_pool: where the workers run; None for a group that attaches to running workers.
        kwargs: arguments of verl's groups that have no effect here: `device_name` (the pool decides), or None.

    Raises:
        TypeError: `kwargs` has any other argument.
    """

    def __init__(self, resource_pool: ResourcePool | None, **kwargs: Any) -> None:
        unknown = [f"{name}={value!r}" for name, value in kwargs.items() if name != "device_name" and value is not None]
        if unknown:
            raise TypeError(f"{type(self).__name__} has no use for {', '.join(unknown)}; leave it out")
        self.resource_pool = resource_pool
        self._workers: list[Any] = []
        self._mesh_info: dict[str, tuple[list[int], list[int]]] = {}
        self._checker: threading.Thread | None = None
        self._checker_stop = threading.Event()

    if TYPE_CHECKING:  # the registered methods of the worker class, bound when the group is made

        def __getattr__(self, name: str) -> Any: ...

    @property
    def world_size(self) -> int:
        """The number of ranks of the group."""
        return len(self._workers)

    def bind_worker_methods(self, cls: type) -> list[str]:
        """Add every method of `cls` that was decorated with `register` to the group, and return their names.

        Raises:
            ValueError: a worker method has the name of an attribute of every worker group.
        """
        names = registered_methods(cls)
        for name in names:
            if hasattr(WorkerGroup, name) or hasattr(type(self), name):
                raise ValueError(
                    f"{cls.__name__}.{name} cannot be offered by the group: {type(self).__name__}.{name} "
                    "exists; rename it"
                )
            setattr(self, name, GroupMethod(self, getattr(cls, name), name))
        return names

    def run_method(self, method: GroupMethod, args: tuple[Any, ...], kwargs: dict[str, Any], padding: Any) -> Any:
        """Run a dispatched call and collect its outputs."""
        raise NotImplementedError

    def mesh_info(self, mesh_name: str) -> tuple[list[int], list[int]]:
        """Return (data-parallel rank of each rank, ranks to collect from in data-parallel order) of a mesh. The workers
        are asked only once."""
        if mesh_name not in self._mesh_info:
            entries = self._query_dispatch_collect(mesh_name)
            dp_ranks = [dp_rank for dp_rank, _ in entries]
            self._mesh_info[mesh_name] = (
                dp_ranks,
                collect_order(mesh_name, dp_ranks, [collects for _, collects in entries]),
            )
        return self._mesh_info[mesh_name]

    def dp_size(self, mesh_name: str) -> int:
        """Return the number of shards that a batch is split into in calls over a mesh.

        This is less than `world_size` if several ranks share one copy of the model (tensor, pipeline or sequence
        parallelism).
        """
        return len(self.mesh_info(mesh_name)[1])

    # --- aliveness

    def check_alive(self) -> None:
        """Raise the failure of a dead worker, if there is one."""
        raise NotImplementedError

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Check the workers in a background thread, so that a death is noticed while the controller is busy elsewhere.

        The thread logs the death at once, and the group's next call raises it.
        """
        if self._checker is not None and self._checker.is_alive():
            return
        self._checker_stop.clear()
        self._checker = threading.Thread(
            target=self._check_repeatedly, args=(every_n_seconds,), name="worker-aliveness", daemon=True
        )
        self._checker.start()

    def stop_worker_aliveness_check(self) -> None:
        """Stop the background thread."""
        self._checker_stop.set()
        if self._checker is not None and self._checker is not threading.current_thread():
            self._checker.join(timeout=5)
        self._checker = None

    def _check_repeatedly(self, every_n_seconds: float) -> None:
        while not self._checker_stop.wait(every_n_seconds):
            started = time.monotonic()
            try:
                self.check_alive()
            except Exception as error:
                notify(str(error), "error")
                return
            # a slow check is not repeated at once
            self._checker_stop.wait(min(1.0, time.monotonic() - started))
