"""The ways by which rounds of shards reach engines: the memory of a node, that of a GPU, and point to point."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import shared_memory
from typing import Any, ClassVar, NamedTuple

import ray
import torch

from hybridrl.hybrid_engine.buckets import ShardBucket, TransportKind
from hybridrl.hybrid_engine.delta import DeltaForm, SentPieces
from hybridrl.hybrid_engine.schedule import Message, Round
from hybridrl.hybrid_engine.transports import (
    CudaIpcTransport,
    RankTransport,
    Transport,
    UpdateTarget,
    make_segments,
    on_all_ranks,
)
from hybridrl.layouts.slices import TensorSlice
from hybridrl.notify import notify
from hybridrl.utils import device, distributed
from hybridrl.utils.distributed import StandaloneGroup


class SentRound(NamedTuple):
    """A round as it is sent.

    Attributes:
        round: the round.
        digests: of its pieces, by the device that they go to; none if they are not checked.
        changes: how the pieces travel, by the device that they go to and the one they come from; none if in full.
    """

    round: Round
    digests: dict[int, dict[tuple[str, TensorSlice], int]]
    changes: dict[int, dict[int, tuple[DeltaForm, ...]]] | None = None

    def bucket(self, kind: TransportKind, where: Any, size: int, devices: Sequence[int]) -> ShardBucket:
        """Return the message to an engine on these devices."""
        messages = tuple(tuple(self.round.received_by(number)) for number in devices)
        digests = tuple(self.digests.get(number, {}) for number in devices) if self.digests else ()
        changes = () if self.changes is None else tuple(self.changes.get(number, {}) for number in devices)
        return ShardBucket(kind, where, size, self.round.names, messages, digests, changes)


class ShardMemoryTransport(RankTransport):
    """Sends to the engines on this node, through /dev/shm.

    Args:
        writers: training ranks on this node.
    """

    kind: TransportKind = "shared_memory"

    def __init__(self, targets: Sequence[UpdateTarget], writers: int) -> None:
        super().__init__(targets)
        self._writers = writers
        self._segments: list[shared_memory.SharedMemory] = []

    def _open(self, size: int) -> None:
        self.close()
        with on_all_ranks():  # no rank writes before all have found enough memory
            if self.is_read:
                self._segments = make_segments(size, self._writers)

    def _buffer(self, slot: int) -> torch.Tensor:
        if not self.is_read:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._segments[slot].buf, dtype=torch.uint8)

    def _export(self, slot: int) -> tuple[int, str]:
        return distributed.get_rank(), self._segments[slot].name

    def description(self, where: Any, sent: SentRound, target: UpdateTarget) -> ShardBucket:  # type: ignore[override]
        names = tuple(where[rank] for rank in target.ranks)
        return sent.bucket(self.kind, names, self.capacity, target.ranks)

    def close(self) -> None:
        super().close()
        for segment in self._segments:
            segment.close()
            segment.unlink()
        self._segments = []


class ShardIpcTransport(CudaIpcTransport):
    """Sends to engines on the trainer's own GPUs."""

    def description(self, where: Any, sent: SentRound, target: UpdateTarget) -> ShardBucket:  # type: ignore[override]
        return sent.bucket(self.kind, where, self.capacity, target.ranks)


class PointToPointTransport(Transport):
    """Sends from every training rank to engines on devices of their own. Rank 0 notifies them.

    The process group of all ranks and all engine processes is kept for the next update, as long as the engines are the
    same. The memory that is sent is that of `Exchange.staged`, or what is left of it where only changes are sent.

    Args:
        sent: what this rank has sent before; None: everything is sent.
    """

    kind: TransportKind = "point_to_point"
    cached_group: ClassVar[tuple[str, str, StandaloneGroup] | None] = None

    def __init__(self, targets: Sequence[UpdateTarget], sent: SentPieces | None = None) -> None:
        self._rank, self._ranks = distributed.get_rank(), distributed.get_world_size()
        super().__init__(targets)
        self.sent = self.saved = 0
        self._before = sent
        if sent is not None:
            sent.begin()
        self._changes: dict[int, tuple[DeltaForm, ...]] = {}
        self._receivers = [(target.incarnation, number) for target in targets for number in range(target.processes)]
        self._failed = False
        self._staged: list[tuple[Message, torch.Tensor]] = []
        self._size = self._ranks + sum(target.processes for target in targets)
        self._members = " ".join(target.incarnation for target in targets)
        if self.cached_group is None or self.cached_group[0] != self._members:
            type(self).cached_group = None
            type(self).cached_group = self._group()

    def _group(self) -> tuple[str, str, StandaloneGroup]:
        here = device.current_device()
        host = ray.util.get_node_ip_address() if self._rank == 0 else ""
        group = StandaloneGroup(host, 0, 0, self._size, here) if self._rank == 0 else None
        host, port = distributed.all_gather_object((host, group.port if group is not None else 0))[0]
        return self._members, host, group or StandaloneGroup(host, port, self._rank, self._size, here)

    def outgoing(self, now: Round) -> list[Message]:
        """The messages of this rank to engine processes."""
        return [message for message in now.sent_by(self._rank) if message.target >= self._ranks]

    def stage(self, messages: list[tuple[Message, torch.Tensor]]) -> None:
        """Take the bytes of `outgoing` for the next `send`."""
        if self._before is None:
            self._staged = messages
            return
        self._staged, self._changes = [], {}
        self._before.begin_round()
        for message, data in messages:
            changes, short = self._before.encode(message, data, self._receivers[message.target - self._ranks])
            self._changes[message.target] = tuple(changes)
            self._staged.append((message, short))
            self.saved += message.size - short.numel()

    def _open(self, size: int) -> None:
        """Nothing to allocate."""

    def _buffer(self, slot: int) -> torch.Tensor:
        return torch.empty(0)

    def _announce(self, slot: int, sent: SentRound) -> list[Any]:
        if self._failed:
            return []
        assert self.cached_group is not None
        _, host, group = self.cached_group
        membership = (host, group.port, self._size, self._members)
        if self._before is not None:
            sent = sent._replace(changes=self._all_changes())
        acks, first = [], self._ranks
        for target in self.targets if self._rank == 0 else ():
            devices = range(first, first + target.processes)
            ends = [message.end for number in devices for message in sent.round.received_by(number)]
            bucket = sent.bucket(self.kind, (membership, first), max(ends, default=0), devices)
            acks.append(target.replica.load_bucket.remote(bucket))
            first += target.processes
        error = ""
        try:
            group.connect()
            group.send([(data, message.target) for message, data in self._staged if data.numel()])
            self.sent += sum(data.numel() for _, data in self._staged)
        except RuntimeError as caught:
            error = f"{caught}"
        self._staged = []
        if failures := [text for text in distributed.all_gather_object(error) if text]:
            # An engine died. The others may lack this round and would wait for it forever, so all are restarted.
            if self._rank == 0:
                notify(f"a transfer of weights failed, its engines are restarted: {failures[0]}", "warning")
                for target in self.targets:
                    ray.kill(target.replica)
            type(self).cached_group, self._failed = None, True
        return acks

    def _all_changes(self) -> dict[int, dict[int, tuple[DeltaForm, ...]]]:
        """Return the forms in which the pieces of the round travel, by target and source rank."""
        by_target: dict[int, dict[int, tuple[DeltaForm, ...]]] = {}
        for source, changes in enumerate(distributed.all_gather_object(self._changes)):
            for target, each in changes.items():
                by_target.setdefault(target, {})[source] = each
        return by_target

    def finish(self) -> None:
        super().finish()
        if self._before is not None and self._failed:
            self._before.forget()
        elif self._before is not None:
            self._before.end([target.incarnation for target in self.targets])

    def close(self) -> None:
        self._staged = []
