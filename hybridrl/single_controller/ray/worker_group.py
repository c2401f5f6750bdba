"""`RayWorkerGroup`: the ranks of one model program as Ray actors, in one object on the controller."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridrl.errors import PlacementError, WorkerError
from hybridrl.single_controller.base.decorator import PADDING_KEY, finish_output
from hybridrl.single_controller.base.worker import RANK_VARIABLES, WorkerSettings
from hybridrl.single_controller.base.worker_group import ClassWithInitArgs, GroupMethod, WorkerGroup
from hybridrl.single_controller.ray import calls, postmortem
from hybridrl.single_controller.ray.image_references import with_references
from hybridrl.single_controller.ray.payload import put_shared
from hybridrl.single_controller.ray.resource_pool import RayResourcePool
from hybridrl.single_controller.ray.worker_host import WorkerInfo, has_async_methods, hosted
from hybridrl.utils import work_folder
from hybridrl.utils.spans import TimedSpan, new_buffer

# A call that takes longer counts as hanging, unless the group has its own `timeout_s`.
DEFAULT_TIMEOUT_S = 7200.0
# Detached workers are in this namespace, where every driver finds them. Other workers are in their driver's namespace.
NAMESPACE = "hybridrl"
_counter = itertools.count()
# Calls from several threads must reach all ranks in the same order, or their collectives would wait for each other.
_SUBMITTING = threading.Lock()


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class with its constructor arguments, and Ray's options for its actors.

    Args:
        cls: a subclass of `Worker`, or the result of `ray.remote` on one (its options are kept).
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        options: dict[str, Any] = {}
        metadata = getattr(cls, "__ray_metadata__", None)
        if metadata is not None:
            options = {name: value for name, value in (cls._default_options or {}).items() if value is not None}
            cls = metadata.modified_class.__ray_actor_class__
        if not isinstance(cls, type):
            raise TypeError(f"RayClassWithInitArgs takes a class, or ray.remote of a class; got {cls!r}")
        super().__init__(cls, *args, **kwargs)
        self.options = options
        self.additional_resource: dict[str, float] = {}
        #: class of each role, of a class made by `create_colocated_worker_raw_cls` or derived from one
        self.role_classes: dict[str, type] = dict(getattr(cls, "role_classes", {}))

    def set_additional_resource(self, additional_resource: dict[str, float]) -> None:
        """Set custom Ray resources that each actor takes of its slot.

        A slot holds such a resource if the pool has it as `accelerator_type`, 1e-4 of it.
        """
        self.additional_resource = additional_resource

    def update_options(self, options: dict[str, Any]) -> None:
        """Add Ray actor options (`max_concurrency`, `runtime_env`, ...) to those the group sets."""
        self.options.update(options)

    def actor_class(self) -> Any:
        """Return the Ray actor class of this worker class."""
        is_async = any(map(has_async_methods, [self.cls, *self.role_classes.values()]))
        return ray.remote(hosted(self.cls, is_async))

    def actor_options(self, resources: dict[str, float]) -> dict[str, Any]:
        """Return the options for one actor: `resources` (such as `num_cpus`), overridden by the user's options."""
        options = {**resources, **self.options}
        if self.additional_resource:
            options["resources"] = {**options.get("resources", {}), **self.additional_resource}
        return options


class RayWorkerGroup(WorkerGroup):
    """Workers of one class, one in each slot of a pool, or workers that already run.

    The registered methods of the worker class become methods of the group. Starting is asynchronous: the constructor
    returns as soon as Ray has been asked for the processes, so several groups (and the controller's own preparations)
    start in parallel. The first call, or `wait_until_ready`, waits for the workers' constructors and reports their
    failures.

    Args:
        resource_pool: the slots; None to attach to running workers.
        ray_cls_with_init: the worker class with its arguments.
        bin_pack: keep each node's slots on one node (STRICT_PACK), rather than as close as possible (PACK).
        name_prefix: prefix of the actors' names, by which `from_detached` finds them.
        detached: whether the workers outlive this driver.
        worker_names: names of running workers to attach to.
        worker_handles: handles of running workers to attach to.
        ray_wait_register_center_timeout: seconds within which all workers must be started and constructed.
        role: the group's name in messages; by default, that of the worker class.
        timeout_s: seconds after which a call without an answer from all ranks fails.
        threads: number of compute threads in each worker; None shares each node's cores among its workers.
        master_port: port of the process group on rank 0's node; None takes a free one.
        worker_env: further environment variables of the workers, except those of a rank, such as `RANK`.

    Raises:
        ValueError: there is no pool or class to start from, or `worker_env` sets a rank's variable.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: list[str] | None = None,
        worker_handles: list[Any] | None = None,
        ray_wait_register_center_timeout: float = 300,
        *,
        role: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        threads: int | None = None,
        master_port: int | None = None,
        worker_env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(resource_pool, **kwargs)
        self.ray_cls_with_init = ray_cls_with_init
        self.name_prefix = name_prefix or f"workers{next(_counter)}_{os.getpid()}_{int(time.time() * 1000):x}"
        self.detached = detached
        self.timeout_s = timeout_s
        self.start_timeout_s = ray_wait_register_center_timeout
        self.threads = threads
        self.master_port_wanted = master_port
        self.worker_env = dict(worker_env or {})
        if reserved := [name for name in RANK_VARIABLES if name in self.worker_env]:
            raise ValueError(
                f"worker_env sets {', '.join(reserved)}, which differs from rank to rank and is set by the group; "
                "leave it out (master_port= chooses the port of the process group)"
            )
        self.role = role or (ray_cls_with_init.cls.__name__ if ray_cls_with_init is not None else self.name_prefix)
        #: seconds that the slowest rank spent in each method, summed over calls
        self.method_seconds: dict[str, float] = {}
        self._spans: deque[TimedSpan] = new_buffer()
        self.oom_kills_at_start = postmortem.oom_kills()
        self._sub_role = ""
        self._shared = _Shared()
        self._worker_names: list[str] = list(worker_names or [])
        self._roles: dict[str, RayWorkerGroup] = {}
        if resource_pool is None:
            self._attach(worker_handles)
        else:
            if ray_cls_with_init is None:
                raise ValueError("RayWorkerGroup needs ray_cls_with_init to start workers in a resource pool")
            self._start(resource_pool, ray_cls_with_init, "STRICT_PACK" if bin_pack else "PACK")
        self._bind_calls()
        if ray_cls_with_init is not None:
            self.bind_worker_methods(ray_cls_with_init.cls)

    # --- starting

    def _start(self, pool: RayResourcePool, worker_class: RayClassWithInitArgs, strategy: str) -> None:
        slot_resources = pool.bundle_resources()
        if strange := {name for name in worker_class.additional_resource if name not in slot_resources}:
            raise PlacementError(
                f"{self.role}: its workers ask for {', '.join(sorted(strange))} (set_additional_resource), and a slot "
                f"of their pool holds {', '.join(slot_resources)}. RayResourcePool(..., accelerator_type=...) puts one "
                "there"
            )
        pool.get_placement_groups(strategy)
        slots = pool.slots()
        share = 1.0 / pool.max_colocate_count
        actor_class = worker_class.actor_class()
        for rank, (group, bundle) in enumerate(slots):
            name = f"{self.name_prefix}_{worker_class.cls.__name__}_{rank}"
            options = worker_class.actor_options({"num_cpus": share, "num_gpus": share if pool.use_gpu else 0})
            options.update(
                name=name,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            )
            if self.detached:
                options.update(lifetime="detached", namespace=NAMESPACE)
            self._workers.append(actor_class.options(**options).remote())
            self._worker_names.append(name)
        pool.workers.update(self._workers)
        master = self._workers[0]._host_reserve.remote(self.master_port_wanted or 0)
        local_sizes, local_ranks = pool.local_world_size_list(), pool.local_rank_list()
        node_workers = _slots_by_node(slots)
        arguments = put_shared([(worker_class.args, worker_class.kwargs)] * len(slots))[0]
        for rank, worker in enumerate(self._workers):
            settings = WorkerSettings(
                role=self.role,
                rank=rank,
                world_size=len(slots),
                local_rank=local_ranks[rank],
                local_world_size=local_sizes[rank],
                use_gpu=pool.use_gpu,
                threads=self.threads or 0,
                node_workers=max(node_workers[rank], local_sizes[rank]),
                env=self.worker_env,
                folder=work_folder.of_program(),
            )
            self._shared.building.append(worker._host_build.remote(settings, master, arguments))

    def _attach(self, handles: list[Any] | None) -> None:
        if handles is None:
            if not self._worker_names:
                raise ValueError(
                    "give a resource_pool to start workers, or worker_names or worker_handles to attach to running ones"
                )
            handles = []
            for name in self._worker_names:
                handle = _find_actor(name)
                if handle is None:
                    raise WorkerError(
                        f"there is no running worker named {name!r}; was its group started with "
                        "detached=True, in this cluster?"
                    )
                handles.append(handle)
        self._workers = list(handles)
        self._shared.building = [worker._host_info.remote() for worker in self._workers]

    def wait_until_ready(self) -> None:
        """Wait until every worker's constructor has run.

        Raises:
            WorkerError: one failed.
            WorkerTimeoutError: `ray_wait_register_center_timeout` passed.
        """
        shared = self._shared
        if shared.infos:
            return
        self.raise_if_ended()
        building = shared.building
        start = calls.GroupCall(self, calls.CONSTRUCTOR, range(len(building)), building, building)
        start.wait(self.start_timeout_s)
        shared.infos = ray.get(building)

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: list[str] | None = None,
        worker_handles: list[Any] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> RayWorkerGroup:
        """Return a group of workers that already run, from their names or handles in rank order."""
        return cls(
            resource_pool=None,
            ray_cls_with_init=ray_cls_with_init,
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
            **kwargs,
        )

    # --- roles of colocated workers

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """Return one group per role of colocated workers (`create_colocated_worker_cls`), all on the same processes.

        Args:
            prefix_set: the roles to make groups for.
        """
        return {role: self._role_group(role) for role in prefix_set}

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """The same as `spawn`: colocated roles always share their process."""
        return self.spawn(prefix_set)

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Add an attribute for each role to this group: `group.actor.update_actor(batch)`."""
        for role, group in self.spawn(prefix_set).items():
            setattr(self, role, group)

    def _role_group(self, role: str) -> RayWorkerGroup:
        if role in self._roles:
            return self._roles[role]
        classes = self.ray_cls_with_init.role_classes if self.ray_cls_with_init is not None else {}
        if role not in classes:
            raise ValueError(
                f"{role!r} is no role of these workers; they have {', '.join(classes) or 'none (not colocated)'}"
            )
        group = object.__new__(type(self))
        group.__dict__.update(
            {name: value for name, value in self.__dict__.items() if not isinstance(value, GroupMethod)},
            role=role,
            method_seconds={},
            _spans=new_buffer(),
            ray_cls_with_init=RayClassWithInitArgs(classes[role]),
            _sub_role=role,
            _mesh_info={},
            _roles={},
        )
        group._bind_calls()
        group.bind_worker_methods(classes[role])
        self._roles[role] = group
        return group

    # --- calls

    def _bind_calls(self) -> None:
        # Ray's options() costs more than the call itself, so it is called once per worker.
        self._callers = [worker._host_call.options(num_returns=2) for worker in self._workers]

    def run_method(self, method: GroupMethod, args: tuple[Any, ...], kwargs: dict[str, Any], padding: Any) -> Any:
        """Run a dispatched call on its ranks and collect the outputs."""
        if method.rank_zero:
            call = self._submit(method.name, [0], *_first(args, kwargs, self.world_size))
        else:
            call = self._submit(method.name, range(self.world_size), *_per_worker(args, kwargs, self.world_size))
        if not method.blocking:
            output = calls.RayPendingOutputs(call, single=method.rank_zero)
            collected = finish_output(method.collect_fn(self, output), padding)
            call.watch(collected)
            return collected
        call.wait()
        values = ray.get(call.results)
        if method.rank_zero:
            values = values[0]
        return finish_output(method.collect_fn(self, values), padding)

    def _submit(
        self, name: str, ranks: Sequence[int], columns: list[list[Any]], named: dict[str, list[Any]]
    ) -> calls.GroupCall:
        """Send one call. `columns` and `named` hold each argument's value for each of `ranks`."""
        self._check_usable()
        columns = [_placed(column) for column in columns]
        named = {key: _placed(column) for key, column in named.items()}
        results, answers = [], []
        with _SUBMITTING:
            for index, rank in enumerate(ranks):
                result, answer = self._callers[rank].remote(
                    self._sub_role,
                    name,
                    *(column[index] for column in columns),
                    **{key: column[index] for key, column in named.items()},
                )
                results.append(result)
                answers.append(answer)
        return calls.GroupCall(self, name, ranks, results, answers)

    def _check_usable(self) -> None:
        self.raise_if_ended()
        if not self._shared.infos:
            self.wait_until_ready()
        calls.check_in_flight(self)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method on rank 0 and return its value. Any method of the worker can be called, registered or not."""
        call = self._submit(method_name, [0], [[arg] for arg in args], {name: [arg] for name, arg in kwargs.items()})
        call.wait()
        return ray.get(call.results[0])

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method on rank 0 and return a reference to its value at once."""
        call = self._submit(method_name, [0], [[arg] for arg in args], {name: [arg] for name, arg in kwargs.items()})
        call.watch()
        return call.results[0]

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """The same as `execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a method on all ranks and return their values in rank order.

        If every argument is a list of world_size entries, each rank gets its own entry. Otherwise all ranks get
        everything.
        """
        return self.execute_all_async(method_name, *args, **kwargs).get()

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> calls.RayPendingOutputs:
        """Run `execute_all_sync` without waiting, and return a list of references with `get()`."""
        kwargs.pop(PADDING_KEY, None)
        count = self.world_size
        call = self._submit(method_name, range(count), *_per_worker(args, kwargs, count))
        outputs = calls.RayPendingOutputs(call)
        call.watch(outputs)
        return outputs

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> calls.RayPendingOutputs:
        """The same as `execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def add_spans(self, method: str, spans: Mapping[int, tuple[float, float]]) -> None:
        """Add the times of a call (constructors are not calls): when each rank began it, and its seconds."""
        if method == calls.CONSTRUCTOR:
            return
        slowest = max((seconds for _, seconds in spans.values()), default=0.0)
        self.method_seconds[method] = self.method_seconds.get(method, 0.0) + slowest
        self._spans += [TimedSpan(f"{self.role}/{method}", rank, *spans[rank]) for rank in sorted(spans)]

    def take_spans(self) -> list[TimedSpan]:
        """Return when each rank was in which method since the previous call of this method; the newest few thousand."""
        spans = list(self._spans)
        self._spans.clear()
        return spans

    # --- state

    @property
    def worker_names(self) -> list[str]:
        """The actors' names, in rank order, for `from_detached`."""
        return self._worker_names

    @property
    def workers(self) -> list[Any]:
        """The actors' handles, in rank order."""
        return self._workers

    @property
    def world_size(self) -> int:
        """The number of ranks of the group."""
        return len(self._workers)

    @property
    def master_address(self) -> str:
        """Address of rank 0's node."""
        self.wait_until_ready()
        return self._shared.infos[0].master_address

    @property
    def master_port(self) -> str:
        """The port on rank 0's node that is kept free for the process group."""
        self.wait_until_ready()
        return str(self._shared.infos[0].master_port)

    def info(self, rank: int) -> WorkerInfo | None:
        """Return where a rank runs, once it is known."""
        return self._shared.infos[rank] if self._shared.infos else None

    def describe_rank(self, rank: int) -> str:
        """Return one line with the location of a rank."""
        info = self.info(rank)
        if info is None:
            return f"  rank {rank}: not up yet ({self.name_prefix})"
        return f"  rank {rank}: node {info.node}, pid {info.pid}"

    def shares_workers(self, other: RayWorkerGroup) -> bool:
        """Return whether both groups run on the same processes."""
        return self._shared is other._shared

    def check_alive(self) -> None:
        """Raise `WorkerDiedError` if a worker's process has ended. Busy workers count as alive."""
        self.raise_if_ended()
        shared = self._shared
        if not shared.pings:
            shared.pings = [worker._host_ping.remote() for worker in self._workers]
        done, _ = ray.wait(shared.pings, num_returns=len(shared.pings), timeout=0.05)
        for rank, ping in enumerate(shared.pings):
            if ping in done:
                try:
                    ray.get(ping)
                except ray.exceptions.RayActorError as error:
                    shared.failure = postmortem.died(self, rank, "no method (found by the aliveness check)", error, "")
                    raise shared.failure from None
        if len(done) == len(shared.pings):
            shared.pings = []

    def raise_if_ended(self) -> None:
        """Raise the failure that ended this group's workers, if one did."""
        if self._shared.failure is not None:
            raise self._shared.failure

    def end_with(self, error: WorkerError) -> None:
        """End the group's processes. Every later call raises `error`."""
        if self._shared.failure is None:
            self._shared.failure = error
        self.kill()

    def kill(self) -> None:
        """End the group's processes at once."""
        self.stop_worker_aliveness_check()
        calls.forget(self)
        for worker in self._workers:
            ray.kill(worker, no_restart=True)

    def __repr__(self) -> str:
        return f"RayWorkerGroup({self.role}, world_size={self.world_size})"


class _Shared:
    """State that all groups on the same processes share."""

    def __init__(self) -> None:
        self.building: list[Any] = []
        self.infos: list[WorkerInfo] = []
        self.pings: list[Any] = []
        self.failure: WorkerError | None = None


def _placed(column: list[Any]) -> list[Any]:
    """One argument's values as they are sent: what ranks or calls share is in the object store."""
    replaced = {id(value): with_references(value) for value in column}
    return put_shared([replaced[id(value)] for value in column])


def _per_worker(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> tuple[list[Any], dict[str, Any]]:
    """Return each argument as a list with one entry per rank; see `RayWorkerGroup.execute_all_sync`."""
    values = [*args, *kwargs.values()]
    if all(isinstance(value, list | tuple) and len(value) == count for value in values):
        return list(args), kwargs
    return [[arg] * count for arg in args], {name: [arg] * count for name, arg in kwargs.items()}


def _first(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> tuple[list[Any], dict[str, Any]]:
    """Return rank 0's entry of each argument."""
    columns, named = _per_worker(args, kwargs, count)
    return [[column[0]] for column in columns], {name: [column[0]] for name, column in named.items()}


def _find_actor(name: str) -> Any | None:
    """Return a running actor of this driver, or a detached actor, by its name."""
    for namespace in (None, NAMESPACE):
        try:
            return ray.get_actor(name, namespace=namespace)
        except ValueError:
            continue  # Ray raises this if there is none
    return None


def _slots_by_node(slots: list[tuple[Any, int]]) -> list[int]:
    """Return for each slot how many slots of all placement groups of this cluster are on its node."""
    counts: dict[str, int] = {}
    node_of: dict[tuple[str, int], str] = {}
    for group_id, entry in ray.util.placement_group_table().items():
        if entry["state"] != "CREATED":
            continue
        for bundle, node_id in entry["bundles_to_node_id"].items():
            counts[node_id] = counts.get(node_id, 0) + 1
            node_of[group_id, bundle] = node_id
    return [counts.get(node_of.get((group.id.hex(), bundle), ""), 1) for group, bundle in slots]
