"""Small helpers for `torch.distributed` that also work in a process without a process group (a world of one)."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from hybridrl.utils import device

T = TypeVar("T")
# Longer than any collective may take: rank 0 may download a model, or write one to a slow file system.
_FILE_WORK = timedelta(hours=6)
_file_works = itertools.count()
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def is_distributed() -> bool:
    """Return whether this process is in an initialised process group."""
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """Return the rank in the world; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def get_world_size() -> int:
    """Return the number of processes in the world; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def use_interface_of(address: str) -> None:
    """Have gloo use the network interface with this address of the node, unless the user has chosen one.

    By itself gloo uses the address that the node's name resolves to. On some machines that is 127.0.1.1, or the address
    of a management network, and processes on other nodes cannot connect.
    """
    if os.environ.get(_GLOO_INTERFACE):
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(candidate.address.partition("%")[0] == address for candidate in addresses):
            os.environ[_GLOO_INTERFACE] = name
            return


def init_process_group(
    rank: int, world_size: int, master_address: str, master_port: int, timeout_seconds: float = 1800.0
) -> None:
    """Join the process group of a worker group, with the device's own back end. Does nothing if a group is already
    joined.

    Args:
        timeout_seconds: how long any collective may wait for a peer before it raises.

    Raises:
        RuntimeError: not all ranks joined the group; the error names the address and this rank.
    """
    if is_distributed():
        return
    address = (
        f"tcp://[{master_address}]:{master_port}" if ":" in master_address else f"tcp://{master_address}:{master_port}"
    )
    try:
        dist.init_process_group(
            backend=device.backend_name(),
            init_method=address,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
            # NCCL connects here then, instead of in the first collective, which may be in the middle of a step.
            device_id=device.current_device() if device.is_gpu() else None,
        )
    except Exception as error:
        raise RuntimeError(
            f"rank {rank} of {world_size} could not join the process group at {address} within "
            f"{timeout_seconds:.0f} s: {error}"
        ) from error


def collective_timeout() -> timedelta:
    """Return how long a collective of the default process group may wait, for further groups."""
    timeout: timedelta = dist.group.WORLD._get_backend(device.current_device()).options._timeout  # type: ignore[union-attr]
    return timeout


def destroy_process_group() -> None:
    """Leave the process group, if there is one."""
    if is_distributed():
        dist.destroy_process_group()


def barrier() -> None:
    """Wait for every rank. This uses main memory, so it does not wait for work queued on a GPU."""
    if get_world_size() > 1:
        dist.all_reduce(torch.zeros(1))


def on_rank_0(work: Callable[[], T]) -> T | None:
    """Call `work` on rank 0 while the others wait for it, and return its result there; None on the others.

    Reading and writing files may take longer than a collective may, so this is none. All ranks call it in the same
    order.
    """
    if get_world_size() == 1:
        return work()
    store, done = dist.distributed_c10d._get_default_store(), f"hybridrl/file_work/{next(_file_works)}"
    if get_rank() != 0:
        store.wait([done], _FILE_WORK)
        return None
    try:
        return work()
    finally:
        store.set(done, "")


def all_reduce_max(value: int, group: dist.ProcessGroup | None = None) -> int:
    """Return the largest of the ranks' integers. The tensor is in main memory, so this does not wait for a GPU."""
    if not is_distributed() or dist.get_world_size(group) == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return int(tensor.item())


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return every rank's tensor, in rank order of the group. All have the same shape and are in main memory."""
    if not is_distributed() or dist.get_world_size(group) == 1:
        return [tensor]
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor.contiguous(), group=group)
    return gathered


def all_gather_object(value: Any) -> list[Any]:
    """Return every rank's object, in rank order."""
    if get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def broadcast_object(value: Any) -> Any:
    """Return rank 0's object."""
    if get_world_size() == 1:
        return value
    sent = [value if get_rank() == 0 else None]
    dist.broadcast_object_list(sent, src=0)
    return sent[0]


@contextlib.contextmanager
def _blocking_wait() -> Iterator[None]:
    """Make NCCL groups created in the block raise if a rank is gone. Others end the process after a timeout."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class StandaloneGroup:
    """A process group besides the default one, for processes that have no common world.

    Rank 0 is created first and its `port` is sent to the others. Each then calls `connect`, which waits for all.

    Args:
        host: the node of rank 0.
        port: the port on which rank 0 listens; 0 on rank 0 takes a free one.
        device: the device of the tensors, which decides between gloo and NCCL.
        timeout_seconds: how long to wait for the others.
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_seconds: float = 300.0,
    ) -> None:
        self._timeout = timedelta(seconds=timeout_seconds)
        self._rank, self._world_size, self._device = rank, world_size, device
        self._store = dist.TCPStore(
            host, port, world_size, is_master=rank == 0, timeout=self._timeout, wait_for_workers=False
        )
        self.port = self._store.port
        self._group: Any = None

    def connect(self) -> None:
        """Wait for the other ranks. A second call does nothing."""
        if self._group is not None:
            return
        store = dist.PrefixStore("hybridrl", self._store)
        if self._device.type == "cpu":
            self._group = dist.ProcessGroupGloo(store, self._rank, self._world_size, self._timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            with _blocking_wait():
                self._group = dist.ProcessGroupNCCL(store, self._rank, self._world_size, options)

    def send(self, parts: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Send each tensor to its rank, and wait until this is done."""
        for work in [self._group.send([part], rank, 0) for part, rank in parts]:
            work.wait()
        device.synchronize()

    def receive(self, parts: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Overwrite each tensor with that which its rank sends, and wait until this is done."""
        for work in [self._group.recv([part], rank, 0) for part, rank in parts]:
            work.wait()
        device.synchronize()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` with that of `root`, and wait until this is done."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._group.broadcast([tensor], options).wait()
        device.synchronize()
