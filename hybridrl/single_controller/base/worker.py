"""One rank of a worker group: its identity, the address of its peers, and its part in each dispatch mesh."""

from __future__ import annotations

import faulthandler
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hybridrl.single_controller.base.decorator import Dispatch, register
from hybridrl.utils.cores import available_cores

# `set_up_process` sets these for each rank. Nothing else may set them.
RANK_VARIABLES = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_RANK",
    "RAY_LOCAL_WORLD_SIZE",
    "RAY_LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# Libraries read their number of threads from these when they are imported.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class WorkerSettings:
    """Settings that a rank needs before its worker object is built.

    Attributes:
        role: the group's name in messages.
        threads: number of compute threads in this process; 0 shares the node's cores evenly among `node_workers`.
        node_workers: number of worker processes on this node, including those of other groups.
        folder: working folder of the program that started the group; see `hybridrl.utils.work_folder`.
    """

    role: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    use_gpu: bool = False
    threads: int = 0
    node_workers: int = 1
    env: dict[str, str] = field(default_factory=dict)
    folder: str | None = None


class PortReservation:
    """A TCP port that is reserved while this object exists, and that `torch.distributed` can still listen on.

    The port is bound with SO_REUSEADDR but never listened on. The kernel then does not assign it to another process
    that asks for a free port, while a process that names it (rank 0's store) can still bind it.

    Raises:
        OSError: `port` is not 0 and is taken.
    """

    def __init__(self, port: int = 0) -> None:
        self._socket = _bound_socket(port)
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Release the port."""
        self._socket.close()


def _bound_socket(port: int) -> socket.socket:
    # Both address families if the machine has them, as the store does.
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            bound = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # a kernel without IPv6
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            bound.bind((host, port))
            return bound
        except OSError:
            bound.close()
            if family == socket.AF_INET:
                raise
    raise OSError("this machine offers neither IPv6 nor IPv4 sockets")


def set_up_process(settings: WorkerSettings, master_address: str, master_port: int) -> None:
    """Set up a rank's environment: the variables of `torch.distributed`, the thread counts, crash reports.

    Raises:
        UserError: the rank has a GPU that PyTorch cannot use.
    """
    import torch

    from hybridrl.utils import device

    faulthandler.enable()
    if not settings.use_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a slot without a GPU uses the CPU, even if there are GPUs
    else:
        device.require_gpu()
    one_visible = settings.use_gpu and torch.cuda.device_count() == 1
    threads = settings.threads or max(1, available_cores() // max(1, settings.node_workers))
    os.environ.update(
        {
            "WORLD_SIZE": str(settings.world_size),
            "RANK": str(settings.rank),
            "LOCAL_WORLD_SIZE": str(settings.local_world_size),
            # an index among the devices that this process sees
            "LOCAL_RANK": "0" if one_visible else str(settings.local_rank),
            # verl's names of the place on the node, whichever devices are visible
            "RAY_LOCAL_WORLD_SIZE": str(settings.local_world_size),
            "RAY_LOCAL_RANK": str(settings.local_rank),
            "MASTER_ADDR": master_address,
            "MASTER_PORT": str(master_port),
            "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "false"),
            **dict.fromkeys(THREAD_VARIABLES, str(threads)),
            **settings.env,
        }
    )
    torch.set_num_threads(threads)


class Worker:
    """Base of every class whose instances are the ranks of a worker group.

    A subclass calls `super().__init__()` first. From then on `rank`, `world_size`, `local_rank`, `master_address`
    and `master_port` are known, and the environment holds what `torch.distributed.init_process_group()` reads.
    Outside a group (in a plain script or a test) the same variables are read, with a world of one as their default.

    Args:
        cuda_visible_devices: devices that this process may use; None leaves them unchanged.
    """

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        if cuda_visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices
        self._rank = int(os.environ.get("RANK", "0"))
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._dispatch_dp_rank: dict[str, int] = {}
        self._collect_dp_rank: dict[str, bool] = {}
        self.fused_worker_dict: dict[str, Any] = {}

    @classmethod
    def env_keys(cls) -> list[str]:
        """Return the environment variables that define a rank."""
        return [
            "WORLD_SIZE",
            "RANK",
            "LOCAL_WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
            "CUDA_VISIBLE_DEVICES",
        ]

    @property
    def rank(self) -> int:
        """This worker's number in its group, 0 .. world_size - 1."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of workers in the group."""
        return self._world_size

    @property
    def local_rank(self) -> int:
        """Index of this worker's device among those its process sees; without GPUs, its number on the node."""
        return self._local_rank

    @property
    def local_world_size(self) -> int:
        """The number of the group's workers on this node."""
        return self._local_world_size

    @property
    def master_address(self) -> str:
        """Address of rank 0's node."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def master_port(self) -> int:
        """Port on rank 0's node that is kept free for the group's process group."""
        return int(os.environ.get("MASTER_PORT", "0"))

    def get_master_addr_port(self) -> tuple[str, str]:
        """Return the address and port of the group's process group."""
        return self.master_address, str(self.master_port)

    def get_cuda_visible_devices(self) -> str:
        """Return the devices that this process may use, as the environment says; `"not set"` without a limit."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def get_fused_worker_by_name(self, worker_name: str) -> Any:
        """Return another role's worker in the same process (see `create_colocated_worker_cls`), or None."""
        return self.fused_worker_dict.get(worker_name)

    # --- dispatch meshes

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: dict[str, int], collect_dp_rank: dict[str, bool]
    ) -> None:
        """Take over another worker's meshes, e.g. those of an inner worker.

        Example: `set_dispatch_collect("actor", **inner.get_dispatch_collect())`.

        Args:
            mesh_name: must be new to this worker.
            dispatch_dp_rank: data-parallel rank by mesh name.
            collect_dp_rank: whether outputs are collected from this rank, by mesh name.
        """
        self._check_new_mesh(mesh_name)
        self._dispatch_dp_rank.update(dispatch_dp_rank)
        self._collect_dp_rank.update(collect_dp_rank)

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """Return all meshes of this worker, as the arguments of `set_dispatch_collect`."""
        return {"dispatch_dp_rank": self._dispatch_dp_rank, "collect_dp_rank": self._collect_dp_rank}

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Set which shard of a batch this rank takes in calls over `mesh_name`, and whether its outputs are
        collected."""
        self._check_new_mesh(mesh_name)
        self._dispatch_dp_rank[mesh_name] = dp_rank
        self._collect_dp_rank[mesh_name] = is_collect

    def _check_new_mesh(self, mesh_name: str) -> None:
        if mesh_name in self._dispatch_dp_rank or mesh_name in self._collect_dp_rank:
            raise ValueError(f"rank {self.rank} registered the dispatch mesh {mesh_name!r} already")

    def query_collect_info(self, mesh_name: str) -> bool:
        """Return whether outputs of calls over `mesh_name` are collected from this rank."""
        return self._mesh_entry(self._collect_dp_rank, mesh_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_collect(self, mesh_name: str) -> tuple[int, bool]:
        return self._mesh_entry(self._dispatch_dp_rank, mesh_name), self._mesh_entry(self._collect_dp_rank, mesh_name)

    def _mesh_entry(self, table: dict[str, Any], mesh_name: str) -> Any:
        if mesh_name not in table:
            registered = ", ".join(map(repr, table)) or "none"
            raise ValueError(
                f"{type(self).__name__} has no dispatch mesh {mesh_name!r} (it has: {registered}). Call "
                f"_register_dispatch_collect_info({mesh_name!r}, dp_rank=..., is_collect=...) in the worker "
                "before the first call over it"
            )
        return table[mesh_name]

    # --- functions provided by the caller

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func(worker, *args, **kwargs)` on every rank, with `DataProto` arguments split over the ranks."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func(*args, **kwargs)` on rank 0."""
        return func(*args, **kwargs)
