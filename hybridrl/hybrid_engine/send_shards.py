"""Sends each process of the engines the slices of the weights that it needs, and nothing else, by a plan.

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

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from hybridrl.engine.capabilities import WeightShard
from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.buckets import Checkpoint, RequiredSlices
from hybridrl.hybrid_engine.delta import SentPieces
from hybridrl.hybrid_engine.exchange import Exchange, Shards
from hybridrl.hybrid_engine.plan import plan_slices
from hybridrl.hybrid_engine.schedule import Round, schedule
from hybridrl.hybrid_engine.shard_transports import (
    PointToPointTransport,
    SentRound,
    ShardIpcTransport,
    ShardMemoryTransport,
)
from hybridrl.hybrid_engine.stream import TransferReport
from hybridrl.hybrid_engine.transports import (
    RankTransport,
    Transport,
    UpdateTarget,
    ipc_unsupported_reason,
    on_all_ranks,
    pipelined_bucket,
)
from hybridrl.layouts.slices import TensorSlice, TensorSlices
from hybridrl.notify import notify
from hybridrl.utils import device, distributed

#: slots and staging memory share two buckets
_BUCKETS, _SHARES = 2, 3
#: engines of which a sender keeps what they need
_MOST_REQUIRED = 1024


@dataclass(frozen=True)
class TrainingShards:
    """Shards of all training ranks; the same on every rank."""

    checkpoint: Checkpoint
    slices: list[dict[str, TensorSlices]]
    copies: list[int]
    nodes: list[str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes for a plan, in which a scalar has one dimension."""
        return {name: shape or (1,) for name, shape in self.checkpoint.shapes.items()}


class ShardSender:
    """Sends shards to engines; a training rank keeps it over updates. All ranks make the same calls together.

    Args:
        dtype: in which weights are sent; None: that of the shards.
        bucket_bytes: `update_weights_bucket_megabytes`.
        copy_of_model: the copy of the model that this rank's shards belong to.
        check: engines compare the digest of every piece with that of the shard that it comes from.
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
        self._training: TrainingShards | str | None = None
        self._required: dict[str, list[RequiredSlices] | str] = {}
        self._planned: tuple[tuple[str, ...], list[Round]] = (), []
        self._plan_reported = False
        self._sent = SentPieces() if delta else None

    def unsupported_reason(self, shards: Iterable[WeightShard], targets: Sequence[UpdateTarget]) -> str | None:
        """Return why these engines cannot get their weights by a plan, or None if they can.

        The engines have to be waiting for weights. Each is asked once.
        """
        if device.is_gpu() and any(target.ranks for target in targets) and (reason := ipc_unsupported_reason()):
            return f"engines cannot open the trainer's memory: {reason}"
        if self._training is None:
            self._training = self._gather(shards)
        if isinstance(self._training, str):
            return self._training
        self._ask(targets)
        for target in targets:
            required = self._required.get(target.incarnation)
            if isinstance(required, str):
                return required
            if required is not None and len(required) != target.processes:
                return f"{len(required)} of the engine's {target.processes} processes say what they need"
        return None

    def send(self, shards: Iterable[WeightShard], targets: Sequence[UpdateTarget]) -> TransferReport:
        """Send the shards to engines for which `unsupported_reason` has returned None."""
        started = time.perf_counter()
        reached = [target for target in targets if target.incarnation in self._required]
        rounds = self._rounds(reached)
        sliced = ((shard.name, slice_of_shard(shard), shard.tensor.detach()) for shard in shards)
        own = Shards((name, tensor_slice, tensor.view(tensor_slice.extents)) for name, tensor_slice, tensor in sliced)
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
        placed = moved.reused + moved.received + sum(transport.sent for transport in apart)
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
            sent = SentRound(now, self._digests(now, own, exchange))
            for transport in transports:
                if isinstance(transport, PointToPointTransport):
                    transport.reserve(0)
                    transport.stage(exchange.staged(transport.outgoing(now), own))
                transport.send(sent)
        for transport in transports:
            transport.finish()

    def _digests(self, now: Round, own: Shards, exchange: Exchange) -> dict[int, dict[tuple[str, TensorSlice], int]]:
        """The digests of all pieces of a round by the device that they go to; None at all if they are not checked."""
        if not self._checks:
            return {}
        digests: dict[int, dict[tuple[str, TensorSlice], int]] = {}
        for of_rank in distributed.all_gather_object(exchange.digests(now, own, self._gathered.shapes)):
            for target, name, tensor_slice, value in of_rank:
                digests.setdefault(target, {})[name, tensor_slice] = value
        return digests

    # ------------------------------------------------------------------ shards of training, slices that engines need

    @property
    def _gathered(self) -> TrainingShards:
        assert isinstance(self._training, TrainingShards), "unsupported_reason has not returned None"
        return self._training

    def _gather(self, shards: Iterable[WeightShard]) -> TrainingShards | str:
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
            (shard.name, shard.shape, shard.tensor.dtype if shard.keeps_dtype else None, slice_of_shard(shard))
            for shard in own_shards
        ]
        own_dtypes = {shard.name: shard.tensor.dtype for shard in own_shards}
        gathered = distributed.all_gather_object((own, own_dtypes, self._copy, ray.get_runtime_context().get_node_id()))
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, torch.dtype] = {}
        slices_by_rank: list[dict[str, TensorSlices]] = []
        for sliced, stored, _, _ in gathered:
            slices: dict[str, TensorSlices] = {}
            for name, shape, own_dtype, tensor_slice in sliced:
                shapes[name] = tuple(shape)
                dtypes[name] = own_dtype or self._dtype or stored[name]
                if tensor_slice.elements:
                    slices[name] = (*slices.get(name, ()), tensor_slice)
            slices_by_rank.append(slices)
        order = _by_layer(shapes)
        checkpoint = Checkpoint({name: shapes[name] for name in order}, {name: dtypes[name] for name in order})
        copies, nodes = [copy for _, _, copy, _ in gathered], [node for _, _, _, node in gathered]
        return TrainingShards(checkpoint, slices_by_rank, copies, nodes)

    def _ask(self, targets: Sequence[UpdateTarget]) -> None:
        """Ask new engines for the slices that they require. Engines that have ended in between are left out."""
        training = self._gathered
        if len(self._required) > _MOST_REQUIRED:  # most are of engines that were restarted; others are asked again
            self._required = {}
        new = [target for target in targets if target.incarnation not in self._required]
        if not new:
            return
        answers: dict[str, list[RequiredSlices] | str] = {}
        with on_all_ranks():
            if distributed.get_rank() == 0:
                pending = [(target, target.replica.required_slices.remote(training.checkpoint)) for target in new]
                for target, ref in pending:
                    try:
                        answers[target.incarnation] = ray.get(ref) or "the engine takes whole tensors only"
                    except RayTaskError:
                        raise
                    except RayError:  # the process that started it notices too
                        continue
        self._required |= distributed.broadcast_object(answers)

    def _rounds(self, targets: Sequence[UpdateTarget]) -> list[Round]:
        key = tuple(target.incarnation for target in targets)
        if key != self._planned[0]:
            self._planned = key, self._plan(targets)
        return self._planned[1]

    def _plan(self, targets: Sequence[UpdateTarget]) -> list[Round]:
        training, ranks = self._gathered, distributed.get_world_size()
        generation_slices: list[dict[str, TensorSlices]] = [{} for _ in range(ranks)]
        own = {distributed.get_rank()}  # the devices whose messages this rank has to know
        for target in targets:
            required = self._required[target.incarnation]
            assert not isinstance(required, str)
            if target.ranks:
                for rank, of_process in zip(target.ranks, required, strict=True):
                    generation_slices[rank] = dict(of_process.slices)
                if target.ranks[0] in own:
                    own |= set(target.ranks)
            else:
                if 0 in own:
                    own |= set(range(len(generation_slices), len(generation_slices) + len(required)))
                generation_slices += [dict(of_process.slices) for of_process in required]
        apart = len(generation_slices) - ranks
        training_slices = training.slices + [{} for _ in range(apart)]
        copies = training.copies + [max(training.copies) + 1] * apart
        on_node = max(1, training.nodes.count(training.nodes[0]))
        transition = plan_slices(training.shapes, training_slices, generation_slices, copies=copies, per_node=on_node)
        dtypes = training.checkpoint.dtypes
        sizes = sum(
            (tensor.needed * dtypes[name].itemsize for name, tensor in transition.tensors), start=transition.needed * 0
        )
        pipelined = pipelined_bucket(int(sizes.max()))
        most = self._bucket_bytes * _BUCKETS // _SHARES
        if not device.is_gpu():  # the ranks of a node share its memory
            most //= max(map(training.nodes.count, training.nodes))
        rounds = schedule(transition, training_slices, generation_slices, dtypes, max(1, min(most, pipelined)), own)
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
            required = self._required[target.incarnation]
            for of_process in required if not isinstance(required, str) else ():
                whole |= of_process.whole
        if whole:
            name, reason = next(iter(whole.items()))
            notify(
                f"{len(whole)} tensors reach every engine process whole, because its loader does more than copy slices "
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


def slice_of_shard(shard: WeightShard) -> TensorSlice:
    """Return the elements that a shard holds."""
    if not shard.shape:
        return TensorSlice((0,), (1,))
    return TensorSlice(
        shard.offsets, tuple(a + size for a, size in zip(shard.offsets, shard.tensor.shape, strict=True))
    )


def _by_layer(names: Iterable[str]) -> list[str]:
    """Return the names with those of a layer together, so that engines need not hold back incomplete layers."""
    layers: dict[str, list[str]] = {}
    for name in names:
        match = re.match(r".*?\.\d+\.", name)
        layers.setdefault(match.group() if match else name, []).append(name)
    return [name for layer in layers.values() for name in layer]
