"""The ways by which buckets reach engines: shared memory, CUDA IPC, and a broadcast to devices of their own."""

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Any, ClassVar

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from hybridrl.hybrid_engine.buckets import Bucket, BucketEntry, ShardBucket, TransportKind
from hybridrl.notify import notify
from hybridrl.utils import device, distributed
from hybridrl.utils.distributed import StandaloneGroup

_SLOTS = 2
PIPELINED = 8  # minimum number of buckets, so that writing and loading overlap
LEAST_BUCKET = 32 * 2**20


def pipelined_bucket(size: int) -> int:
    """Return the bytes of a bucket for weights of `size` bytes, so that writing and loading overlap."""
    return max(size // PIPELINED, LEAST_BUCKET)


@dataclass(frozen=True)
class UpdateTarget:
    """An engine that receives weights.

    Attributes:
        replica: the Ray actor that it runs in.
        incarnation: identifies this start of the replica.
        node_id: Ray's name of the node it runs on.
        ranks: the training ranks that share its devices; empty if it has its own devices.
        processes: number of the engine's processes that hold weights.
    """

    replica: Any
    incarnation: str
    node_id: str
    ranks: tuple[int, ...]
    processes: int


class Transport(ABC):
    """One way to the engines. It writes into one of two slots while the other is being read."""

    kind: TransportKind

    def __init__(self, targets: Sequence[UpdateTarget]) -> None:
        self.targets = list(targets)
        self.capacity = 0
        self._slot = 0
        self._acks: list[list[Any]] = [[] for _ in range(_SLOTS)]
        self._dead_targets: list[UpdateTarget] = []  # processes that ended meanwhile

    def reserve(self, size: int) -> torch.Tensor:
        """Return at least `size` bytes to write the next bucket into. Waits until no engine reads them any more."""
        self._wait(self._slot)
        if size > self.capacity:
            self._drain()
            self._open(size)
            self.capacity = size
        return self._buffer(self._slot)

    def send(self, filled: Any) -> None:
        """Announce the written bucket to the engines.

        Args:
            filled: what is in it, for `description`: the entries of whole tensors, or a `SentRound`.
        """
        self._acks[self._slot] = self._announce(self._slot, filled)
        self._slot = (self._slot + 1) % _SLOTS

    def description(self, where: Any, filled: tuple[BucketEntry, ...], target: UpdateTarget) -> Bucket | ShardBucket:
        """Return what an engine is told of a bucket; `where` locates the bytes."""
        return Bucket(self.kind, where, filled)

    def finish(self) -> None:
        """Wait until everything is loaded, and free the buckets."""
        self._drain()
        self.close()

    def _drain(self) -> None:
        """Wait until every slot is loaded, and have the engines release the slots."""
        for slot in range(_SLOTS):
            self._wait(slot)
        if self.capacity and self.kind in ("shared_memory", "cuda_ipc"):
            self._acks[0] = [target.replica.load_bucket.remote(Bucket(self.kind, None, ())) for target in self.targets]
            self._wait(0)

    def _wait(self, slot: int) -> None:
        acks, self._acks[slot] = self._acks[slot], []
        for target, ack in zip(self.targets, acks, strict=False):
            try:
                ray.get(ack)
            except RayTaskError:
                raise
            except RayError:  # the replica is gone; the process that started it notices too
                self._dead_targets.append(target)

    def _load(self, where: Any, filled: Any) -> list[Any]:
        """Tell every engine where the bucket is; `filled` is that of `send`."""
        return [target.replica.load_bucket.remote(self.description(where, filled, target)) for target in self.targets]

    @abstractmethod
    def _open(self, size: int) -> None:
        """Allocate slots of this size. The previous slots are free."""

    @abstractmethod
    def _buffer(self, slot: int) -> torch.Tensor:
        """Return the slot's bytes."""

    @abstractmethod
    def _announce(self, slot: int, filled: Any) -> list[Any]:
        """Start the transfer of a slot. Return what to wait for before it may be overwritten, for each target."""

    @abstractmethod
    def close(self) -> None:
        """Free the slots."""


def make_segments(size: int, writers: int = 1) -> list[shared_memory.SharedMemory]:
    """Allocate the slots of a transport through shared memory.

    Args:
        size: bytes of a slot.
        writers: processes of this node that allocate as much.

    Raises:
        MemoryError: /dev/shm is too small.
    """
    room = os.statvfs("/dev/shm")
    free = room.f_bavail * room.f_frsize
    if free < _SLOTS * size * writers:
        raise MemoryError(
            f"/dev/shm has {free / 2**20:.0f} MiB free, and two buckets of weights take "
            f"{_SLOTS * size * writers / 2**20:.0f}: "
            "lower actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes, or mount it larger"
        )
    return [shared_memory.SharedMemory(create=True, size=size) for _ in range(_SLOTS)]


class SharedMemoryTransport(Transport):
    """Sends to the engines on this node, through /dev/shm."""

    kind: TransportKind = "shared_memory"

    def __init__(self, targets: Sequence[UpdateTarget]) -> None:
        super().__init__(targets)
        self._segments: list[shared_memory.SharedMemory] = []

    def _open(self, size: int) -> None:
        self.close()
        self._segments = make_segments(size)

    def _buffer(self, slot: int) -> torch.Tensor:
        return torch.frombuffer(self._segments[slot].buf, dtype=torch.uint8)

    def _announce(self, slot: int, filled: Any) -> list[Any]:
        device.synchronize()
        return self._load(self._segments[slot].name, filled)

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
            segment.unlink()
        self._segments = []


@contextmanager
def on_all_ranks() -> Iterator[None]:
    """Leave the context when every rank has done its part; if one failed, raise on all of them."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    if distributed.all_reduce_max(int(failure is not None)):
        raise failure or RuntimeError("another rank could not send its weights; its error says why")


class RankTransport(Transport):
    """Sends from each training rank to the engine's process on the same device. All ranks take part.

    The first rank of each replica notifies it. A rank without an engine among the targets allocates nothing: what is
    written there is discarded.
    """

    def __init__(self, targets: Sequence[UpdateTarget]) -> None:
        rank = distributed.get_rank()
        super().__init__([target for target in targets if target.ranks[0] == rank])
        self.is_read = any(rank in target.ranks for target in targets)
        self._where: list[dict[Any, Any]] = [{} for _ in range(_SLOTS)]

    def _announce(self, slot: int, filled: Any) -> list[Any]:
        if not self._where[slot]:
            # Not before it is used: memory of a GPU that nobody opens stays allocated.
            own = self._export(slot) if self.is_read else None
            self._where[slot] = dict(export for export in distributed.all_gather_object(own) if export is not None)
        with on_all_ranks():
            device.synchronize()
        return self._load(self._where[slot], filled)

    @abstractmethod
    def _export(self, slot: int) -> tuple[Any, Any]:
        """Return by what an engine's process knows this device, and how it opens the slot."""

    def _wait(self, slot: int) -> None:
        with on_all_ranks():
            super()._wait(slot)

    def close(self) -> None:
        self._where = [{} for _ in range(_SLOTS)]


class CudaIpcTransport(RankTransport):
    """Sends to engines on the trainer's own GPUs."""

    kind: TransportKind = "cuda_ipc"

    def __init__(self, targets: Sequence[UpdateTarget]) -> None:
        super().__init__(targets)
        self._buffers: list[torch.Tensor] = []
        self._exports: list[device.SharedMemory | None] = [None] * _SLOTS

    def _open(self, size: int) -> None:
        self.close()
        here = device.current_device() if self.is_read else torch.device("meta")
        with on_all_ranks(), device.ordinary_segments():
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=here) for _ in range(_SLOTS)]

    def _buffer(self, slot: int) -> torch.Tensor:
        return self._buffers[slot]

    def _export(self, slot: int) -> tuple[str, bytes]:
        export = self._exports[slot] = device.SharedMemory(self._buffers[slot])
        return device.uuid_of(device.current_device()), export.handle

    def _drain(self) -> None:
        super()._drain()
        lost_ranks = {rank for target in self._dead_targets for rank in target.ranks}
        if self.capacity and distributed.get_rank() in set().union(*distributed.all_gather_object(lost_ranks)):
            for export in self._exports:
                if export is not None:
                    export.reclaim()

    def close(self) -> None:
        super().close()
        self._buffers = []
        self._exports = [None] * _SLOTS
        device.empty_cache()


class BroadcastTransport(Transport):
    """Sends from rank 0 to engines on other devices.

    The process group is kept for the next update, as long as the engines are the same.
    """

    kind: TransportKind = "broadcast"
    cached_group: ClassVar[tuple[str, StandaloneGroup] | None] = None

    def __init__(self, targets: Sequence[UpdateTarget]) -> None:
        super().__init__(targets)
        self._buffers: list[torch.Tensor] = []
        self._failed = False
        self._host = ray.util.get_node_ip_address()
        self._size = 1 + sum(target.processes for target in targets)
        self._members = " ".join(target.incarnation for target in targets)
        if self.cached_group is None or self.cached_group[0] != self._members:
            group = StandaloneGroup(self._host, 0, 0, self._size, device.current_device())
            type(self).cached_group = self._members, group

    def _open(self, size: int) -> None:
        here = device.current_device()
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=here) for _ in range(_SLOTS)]

    def _buffer(self, slot: int) -> torch.Tensor:
        return self._buffers[slot]

    def _announce(self, slot: int, filled: tuple[BucketEntry, ...]) -> list[Any]:
        if self._failed:
            return []
        assert self.cached_group is not None
        group = self.cached_group[1]
        membership = (self._host, group.port, self._size, self._members)
        acks, first_rank = [], 1
        for target in self.targets:
            acks.append(target.replica.load_bucket.remote(self.description((membership, first_rank), filled, target)))
            first_rank += target.processes
        try:
            group.connect()
            group.broadcast(self._buffers[slot][: filled[-1].offset + filled[-1].size], root=0)
        except RuntimeError as error:
            # An engine died. The others may lack this bucket and would wait for it forever, so all are restarted.
            notify(f"a broadcast of weights failed, its engines are restarted: {error}", "warning")
            for target in self.targets:
                ray.kill(target.replica)
            type(self).cached_group, self._failed = None, True
        return acks

    def close(self) -> None:
        self._buffers = []


@functools.cache
def ipc_unsupported_reason() -> str | None:
    """Return why engines cannot open the memory of the trainer's GPUs, or None if they can.

    All ranks call this together. The first call tries it, and warns if it fails.
    """
    reasons = [reason for reason in distributed.all_gather_object(device.memory_sharing_unsupported_reason()) if reason]
    if reasons and distributed.get_rank() == 0:
        notify(
            "this machine does not let two processes share memory of a GPU (CUDA IPC), so weights reach the engines "
            f"through main memory (/dev/shm), which is slower: {reasons[0]}",
            "warning",
        )
    return reasons[0] if reasons else None


def transports_to(targets: Sequence[UpdateTarget], node_id: str) -> list[Transport]:
    """Return the transports that this rank writes to. All ranks call this together.

    Args:
        targets: the engines.
        node_id: the node of this rank.
    """
    transports: list[Transport] = []
    shared = [target for target in targets if target.ranks]
    apart = [target for target in targets if not target.ranks]
    if shared and device.is_gpu() and ipc_unsupported_reason() is None:
        transports.append(CudaIpcTransport(shared))
    elif shared:
        nodes = distributed.all_gather_object(node_id)
        here = [target for target in shared if target.node_id == node_id]
        if here and nodes.index(node_id) == distributed.get_rank():
            transports.append(SharedMemoryTransport(here))
    if apart and distributed.get_rank() == 0:
        transports.append(BroadcastTransport(apart))
    return transports
