"""Sends each process of the engines the part of the weights that it needs, and nothing else, by a plan.

Every training rank brings the shards that it holds. What the engine's process on the same device needs of them is
copied into a bucket on that device; the rest comes from other training ranks, straight into the same bucket:

    same device, CPU    shared memory
    same GPU            CUDA IPC
    other devices       point to point from every training rank, over gloo or NCCL

No device holds a whole tensor that its engine process does not need whole. Besides the two shards, a device holds two
slots that engines read, and what it sends in a round; these three together are as large as two buckets.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Any, ClassVar, NamedTuple

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from hybridrl.engine.capabilities import WeightShard
from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.plan import plan_boxes
from hybridrl.hybrid_engine.schedule import Message, Round, schedule
from hybridrl.hybrid_engine.shards import Box, Boxes
from hybridrl.hybrid_engine.transfer import Exchange, Shards
from hybridrl.notify import notify
from hybridrl.utils import device, distributed
from hybridrl.utils.distributed import StandaloneGroup
from hybridrl.weight_sync import send
from hybridrl.weight_sync.delta import DeltaForm, SentPieces
from hybridrl.weight_sync.messages import Checkpoint, Requirement, ShardBucket, TransportKind
from hybridrl.weight_sync.send import (
    CudaIpcTransport,
    RankTransport,
    TransferReport,
    Transport,
    UpdateTarget,
    make_segments,
)

#: slots and staging memory share two buckets
_BUCKETS, _SHARES = 2, 3
#: engines of which a sender keeps what they need
_MOST_REQUIREMENTS = 1024


@dataclass(frozen=True)
class _Training:
    """Shards of all training ranks; the same on every rank."""

    checkpoint: Checkpoint
    boxes: list[dict[str, Boxes]]
    copies: list[int]
    nodes: list[str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes for a plan, in which a scalar has one dimension."""
        return {name: shape or (1,) for name, shape in self.checkpoint.shapes.items()}


class Content(NamedTuple):
    """Content of a round, for an engine.

    Attributes:
        round: the round.
        digests: of its pieces, by the device that they go to; none if they are not checked.
        changes: how the pieces travel, by the device that they go to and the one they come from; none if in full.
    """

    round: Round
    digests: dict[int, dict[tuple[str, Box], int]]
    changes: dict[int, dict[int, tuple[DeltaForm, ...]]] | None = None

    def bucket(self, kind: TransportKind, where: Any, size: int, devices: Sequence[int]) -> ShardBucket:
        """Return the message to an engine on these devices."""
        messages = tuple(tuple(self.round.received_by(number)) for number in devices)
        digests = tuple(self.digests.get(number, {}) for number in devices) if self.digests else ()
        changes = () if self.changes is None else tuple(self.changes.get(number, {}) for number in devices)
        return ShardBucket(kind, where, size, self.round.names, messages, digests, changes)


class ShardSender:
    """Sends shards to engines; a training rank keeps it over updates. All ranks make the same calls together.

    Args:
        dtype: in which weights are sent; None: that of the shards.
        bucket_bytes: `update_weights_bucket_megabytes`.
        copy_of_model: the copy of the model that this rank's shards belong to.
        check: engines compare the digest of every part with that of the shard that it comes from.
        delta: engines on devices of their own are sent only what has changed since they were sent it last.
    """

    def __init__(
        self,
        dtype: torch.dtype | None,
        bucket_bytes: int,
        copy_of_model: int = 0,
        check: bool = False,
        delta: bool = False,
    ) -> None:
        self._dtype = dtype
        self._checks = check
        self._bucket_bytes = bucket_bytes
        self._copy = copy_of_model
        self._training: _Training | str | None = None
        self._needs: dict[str, list[Requirement] | str] = {}
        self._planned: tuple[tuple[str, ...], list[Round]] = (), []
        self._plan_reported = False
        self._sent = SentPieces() if delta else None

    def why_not(self, shards: Iterable[WeightShard], targets: Sequence[UpdateTarget]) -> str | None:
        """Return why these engines cannot get their weights by a plan, or None if they can.

        The engines have to be waiting for weights. Each is asked once.
        """
        if device.is_gpu() and any(target.ranks for target in targets) and (reason := send.why_no_ipc()):
            return f"engines cannot open the trainer's memory: {reason}"
        if self._training is None:
            self._training = self._gather(shards)
        if isinstance(self._training, str):
            return self._training
        self._ask(targets)
        for target in targets:
            needs = self._needs.get(target.incarnation)
            if isinstance(needs, str):
                return needs
            if needs is not None and len(needs) != target.processes:
                return f"{len(needs)} of the engine's {target.processes} processes say what they need"
        return None

    def send(self, shards: Iterable[WeightShard], targets: Sequence[UpdateTarget]) -> TransferReport:
        """Send the shards to engines for which `why_not` has returned None."""
        started = time.perf_counter()
        reached = [target for target in targets if target.incarnation in self._needs]
        rounds = self._rounds(reached)
        parts = ((shard.name, box_of_shard(shard), shard.tensor.detach()) for shard in shards)
        own = Shards((name, box, tensor.view(box.extents)) for name, box, tensor in parts)
        exchange = Exchange(distributed.get_rank(), device.current_device())
        transports = self._transports(reached)
        try:
            self._run(rounds, own, exchange, transports)
        except BaseException:
            if self._sent is not None:
                self._sent.forget()
            for transport in transports:
                transport.close()
            raise
        finally:
            exchange.close()
        moved, apart = (
            exchange.traffic,
            [transport for transport in transports if isinstance(transport, PointToPointTransport)],
        )
        placed = moved.kept + moved.received + sum(transport.sent for transport in apart)
        saved = None if self._sent is None else sum(transport.saved for transport in apart)
        return TransferReport(placed, time.perf_counter() - started, len(rounds), moved.received, saved)

    def _run(self, rounds: Sequence[Round], own: Shards, exchange: Exchange, transports: Sequence[Transport]) -> None:
        largest = max((now.bucket for now in rounds), default=0)
        for now in rounds:
            bucket = torch.empty(0, dtype=torch.uint8)
            for transport in transports:
                if isinstance(transport, RankTransport):
                    bucket = transport.reserve(largest)
            exchange.run(now, own, bucket)
            content = Content(now, self._digests(now, own, exchange))
            for transport in transports:
                if isinstance(transport, PointToPointTransport):
                    transport.reserve(0)
                    transport.stage(exchange.staged(transport.outgoing(now), own))
                transport.send(content)
        for transport in transports:
            transport.finish()

    def _digests(self, now: Round, own: Shards, exchange: Exchange) -> dict[int, dict[tuple[str, Box], int]]:
        """The digests of all pieces of a round by the device that they go to; None at all if they are not checked."""
        if not self._checks:
            return {}
        digests: dict[int, dict[tuple[str, Box], int]] = {}
        for part in distributed.all_gather_object(exchange.digests(now, own, self._gathered.shapes)):
            for target, name, box, value in part:
                digests.setdefault(target, {})[name, box] = value
        return digests

    # ------------------------------------------------------------------ shards of training, boxes that engines need

    @property
    def _gathered(self) -> _Training:
        assert isinstance(self._training, _Training), "why_not has not returned None"
        return self._training

    def _gather(self, shards: Iterable[WeightShard]) -> _Training | str:
        """Return the shards of all ranks, or the reason why one of them cannot export its shards."""
        own_shards: list[WeightShard] = []
        refusal = ""
        try:
            own_shards = list(shards)
        except ModelError as error:
            refusal = str(error)
        refusals = [text for text in distributed.all_gather_object(refusal) if text]
        if refusals:
            return refusals[0]
        own = [
            (shard.name, shard.shape, shard.tensor.dtype if shard.keeps_dtype else None, box_of_shard(shard))
            for shard in own_shards
        ]
        own_dtypes = {shard.name: shard.tensor.dtype for shard in own_shards}
        gathered = distributed.all_gather_object((own, own_dtypes, self._copy, ray.get_runtime_context().get_node_id()))
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, torch.dtype] = {}
        boxes_by_rank: list[dict[str, Boxes]] = []
        for parts, stored, _, _ in gathered:
            boxes: dict[str, Boxes] = {}
            for name, shape, own_dtype, box in parts:
                shapes[name] = tuple(shape)
                dtypes[name] = own_dtype or self._dtype or stored[name]
                if box.elements:
                    boxes[name] = (*boxes.get(name, ()), box)
            boxes_by_rank.append(boxes)
        order = _by_layer(shapes)
        checkpoint = Checkpoint({name: shapes[name] for name in order}, {name: dtypes[name] for name in order})
        return _Training(checkpoint, boxes_by_rank, [part[2] for part in gathered], [part[3] for part in gathered])

    def _ask(self, targets: Sequence[UpdateTarget]) -> None:
        """Request the requirements of engines that are new. Engines that have ended in between are left out."""
        training = self._gathered
        if len(self._needs) > _MOST_REQUIREMENTS:  # most are of engines that were restarted; others are asked again
            self._needs = {}
        new = [target for target in targets if target.incarnation not in self._needs]
        if not new:
            return
        answers: dict[str, list[Requirement] | str] = {}
        with send._on_all_ranks():
            if distributed.get_rank() == 0:
                pending = [(target, target.replica.requirements.remote(training.checkpoint)) for target in new]
                for target, ref in pending:
                    try:
                        answers[target.incarnation] = ray.get(ref) or "the engine takes whole tensors only"
                    except RayTaskError:
                        raise
                    except RayError:  # the process that started it notices too
                        continue
        self._needs |= distributed.broadcast_object(answers)

    def _rounds(self, targets: Sequence[UpdateTarget]) -> list[Round]:
        key = tuple(target.incarnation for target in targets)
        if key != self._planned[0]:
            self._planned = key, self._plan(targets)
        return self._planned[1]

    def _plan(self, targets: Sequence[UpdateTarget]) -> list[Round]:
        training, ranks = self._gathered, distributed.get_world_size()
        generation_boxes: list[dict[str, Boxes]] = [{} for _ in range(ranks)]
        own = {distributed.get_rank()}  # the devices whose messages this rank has to know
        for target in targets:
            needs = self._needs[target.incarnation]
            assert not isinstance(needs, str)
            if target.ranks:
                for rank, need in zip(target.ranks, needs, strict=True):
                    generation_boxes[rank] = dict(need.boxes)
                if target.ranks[0] in own:
                    own |= set(target.ranks)
            else:
                if 0 in own:
                    own |= set(range(len(generation_boxes), len(generation_boxes) + len(needs)))
                generation_boxes += [dict(need.boxes) for need in needs]
        apart = len(generation_boxes) - ranks
        training_boxes = training.boxes + [{} for _ in range(apart)]
        copies = training.copies + [max(training.copies) + 1] * apart
        on_node = max(1, training.nodes.count(training.nodes[0]))
        transition = plan_boxes(training.shapes, training_boxes, generation_boxes, copies=copies, per_node=on_node)
        dtypes = training.checkpoint.dtypes
        sizes = sum(
            (tensor.needed * dtypes[name].itemsize for name, tensor in transition.tensors), start=transition.needed * 0
        )
        pipelined = max(int(sizes.max()) // send._PIPELINED, send._LEAST_BUCKET)
        most = self._bucket_bytes * _BUCKETS // _SHARES
        if not device.is_gpu():  # the ranks of a node share its memory
            most //= max(map(training.nodes.count, training.nodes))
        rounds = schedule(transition, training_boxes, generation_boxes, dtypes, max(1, min(most, pipelined)), own)
        self._report_plan(targets, rounds, int(sizes.max()))
        return rounds

    def _report_plan(self, targets: Sequence[UpdateTarget], rounds: Sequence[Round], largest: int) -> None:
        if self._plan_reported or distributed.get_rank() != 0:
            return
        self._plan_reported = True
        notify(
            f"weights go to the engines by a plan (rollout.checkpoint_engine.method): {len(rounds)} rounds, at most "
            f"{largest / 1e6:.1f} MB for a process"
        )
        whole: dict[str, str] = {}
        for target in targets:
            needs = self._needs[target.incarnation]
            for need in needs if not isinstance(needs, str) else ():
                whole |= need.whole
        if whole:
            name, reason = next(iter(whole.items()))
            notify(
                f"{len(whole)} tensors reach every engine process whole, because its loader does more than copy parts "
                f"of them; {name}: {reason}",
                "warning",
            )

    def _transports(self, targets: Sequence[UpdateTarget]) -> list[Transport]:
        shared = [target for target in targets if target.ranks]
        apart = [target for target in targets if not target.ranks]
        transports: list[Transport] = []
        if shared and device.is_gpu():
            transports.append(ShardIpcTransport(shared))
        elif shared:
            nodes = self._gathered.nodes
            transports.append(ShardMemoryTransport(shared, nodes.count(nodes[distributed.get_rank()])))
        if apart:
            transports.append(PointToPointTransport(apart, self._sent))
        return transports


def box_of_shard(shard: WeightShard) -> Box:
    """Return the elements that a shard holds."""
    if not shard.shape:
        return Box((0,), (1,))
    return Box(shard.offsets, tuple(a + size for a, size in zip(shard.offsets, shard.tensor.shape, strict=True)))


def _by_layer(names: Iterable[str]) -> list[str]:
    """Return the names with those of a layer together, so that engines need not hold back incomplete layers."""
    layers: dict[str, list[str]] = {}
    for name in names:
        match = re.match(r".*?\.\d+\.", name)
        layers.setdefault(match.group() if match else name, []).append(name)
    return [name for layer in layers.values() for name in layer]


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
        with send._on_all_ranks():  # no rank writes before all have found enough memory
            if self.is_read:
                self._segments = make_segments(size, self._writers)

    def _buffer(self, slot: int) -> torch.Tensor:
        if not self.is_read:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._segments[slot].buf, dtype=torch.uint8)

    def _export(self, slot: int) -> tuple[int, str]:
        return distributed.get_rank(), self._segments[slot].name

    def message(self, where: Any, content: Content, target: UpdateTarget) -> ShardBucket:  # type: ignore[override]
        names = tuple(where[rank] for rank in target.ranks)
        return content.bucket(self.kind, names, self.capacity, target.ranks)

    def close(self) -> None:
        super().close()
        for segment in self._segments:
            segment.close()
            segment.unlink()
        self._segments = []


class ShardIpcTransport(CudaIpcTransport):
    """Sends to engines on the trainer's own GPUs."""

    def message(self, where: Any, content: Content, target: UpdateTarget) -> ShardBucket:  # type: ignore[override]
        return content.bucket(self.kind, where, self.capacity, target.ranks)


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
        self._parts: list[tuple[Message, torch.Tensor]] = []
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

    def stage(self, parts: list[tuple[Message, torch.Tensor]]) -> None:
        """Take the bytes of `outgoing` for the next `send`."""
        if self._before is None:
            self._parts = parts
            return
        self._parts, self._changes = [], {}
        self._before.begin_round()
        for message, part in parts:
            changes, short = self._before.encode(message, part, self._receivers[message.target - self._ranks])
            self._changes[message.target] = tuple(changes)
            self._parts.append((message, short))
            self.saved += message.size - short.numel()

    def _open(self, size: int) -> None:
        """Nothing to allocate."""

    def _buffer(self, slot: int) -> torch.Tensor:
        return torch.empty(0)

    def _announce(self, slot: int, content: Content) -> list[Any]:
        if self._failed:
            return []
        assert self.cached_group is not None
        _, host, group = self.cached_group
        membership = (host, group.port, self._size, self._members)
        if self._before is not None:
            content = content._replace(changes=self._all_changes())
        acks, first = [], self._ranks
        for target in self.targets if self._rank == 0 else ():
            devices = range(first, first + target.processes)
            ends = [message.end for number in devices for message in content.round.received_by(number)]
            bucket = content.bucket(self.kind, (membership, first), max(ends, default=0), devices)
            acks.append(target.replica.load_bucket.remote(bucket))
            first += target.processes
        error = ""
        try:
            group.connect()
            group.send([(part, message.target) for message, part in self._parts if part.numel()])
            self.sent += sum(part.numel() for _, part in self._parts)
        except RuntimeError as caught:
            error = f"{caught}"
        self._parts = []
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
        self._parts = []
