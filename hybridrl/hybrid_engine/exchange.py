"""Carries out a plan: every rank brings its part of each round, and its bucket holds what its engine process needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.schedule import ALIGNMENT, Message, Round, TransferPiece
from hybridrl.layouts.digest import digest
from hybridrl.layouts.slices import TensorSlice, TensorSlices

#: a slice of a tensor and the values of its elements
SliceValues = tuple[TensorSlice, torch.Tensor]
#: the device that a piece goes to, its tensor, its slice, and the digest of its elements
Digest = tuple[int, str, TensorSlice, int]


@dataclass
class Traffic:
    """Bytes of weights that this rank has moved.

    Attributes:
        received, sent: over the network between devices.
        reused: copied from the training shard to the bucket of the same device.
    """

    received: int = 0
    sent: int = 0
    reused: int = 0


class Shards:
    """The training shards of this rank, by the name of their tensor.

    Args:
        shards: name, slice and values; they are not copied.
    """

    def __init__(self, shards: Iterable[tuple[str, TensorSlice, torch.Tensor]]) -> None:
        self._shards: dict[str, list[SliceValues]] = defaultdict(list)
        for name, tensor_slice, values in shards:
            self._shards[name].append((tensor_slice, values))

    def slices(self) -> dict[str, TensorSlices]:
        """The slices of each tensor."""
        return {name: tuple(tensor_slice for tensor_slice, _ in shards) for name, shards in self._shards.items()}

    def write(self, piece: TransferPiece, target: torch.Tensor) -> None:
        """Write the elements of a piece into `target`, in its dtype."""
        assemble(target, piece.slice, self._shards[piece.name], piece.name)


def assemble(target: torch.Tensor, tensor_slice: TensorSlice, pieces: Sequence[SliceValues], name: str) -> None:
    """Fill a tensor that has the shape of a slice with the values of disjoint slices; converts to its dtype.

    Raises:
        ModelError: the pieces do not cover the slice.
    """
    covered = 0
    for at, values in pieces:
        both = tensor_slice.intersect(at)
        if both is not None:
            target[both.within(tensor_slice)].copy_(values[both.within(at)])
            covered += both.elements
    if covered != tensor_slice.elements:
        raise ModelError(f"{name}: {covered} of the {tensor_slice.elements} elements of {tensor_slice} are there")


class Exchange:
    """Sends and receives the messages of rounds between the ranks of a process group.

    Args:
        device: of this rank among those of the plan; the devices of the plan that are ranks come first, in their order.
        group: their process group; None: the default one.
        on: where the memory for what is sent is allocated.
    """

    def __init__(self, device: int, on: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.device = device
        self.traffic = Traffic()
        self._group = group
        self._on = on
        self._staging = torch.empty(0, dtype=torch.uint8, device=on)

    def close(self) -> None:
        """Free the memory for what is sent."""
        self._staging = torch.empty(0, dtype=torch.uint8, device=self._on)

    def run(self, now: Round, shards: Shards, bucket: torch.Tensor) -> None:
        """Fill this device's bucket, and give other ranks what they lack. All ranks call this together.

        Messages to devices of the plan that are no ranks of the group are left out; see `staged`.

        Args:
            now: the round.
            shards: this rank's shards.
            bucket: bytes; not used if the device needs nothing.
        """
        operations = []
        for message in now.received_by(self.device):
            if message.source == self.device:
                self._keep(message, shards, bucket)
            else:
                data = bucket[message.begin : message.end]
                operations.append(self._operation(dist.irecv, data, message.source))
                self.traffic.received += data.numel()
        ranks = dist.get_world_size(self._group) if dist.is_initialized() else 1
        outgoing = [message for message in now.sent_by(self.device) if message.target < ranks]
        for message, data in self.staged(outgoing, shards):
            operations.append(self._operation(dist.isend, data, message.target))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def staged(self, messages: Sequence[Message], shards: Shards) -> list[tuple[Message, torch.Tensor]]:
        """Return messages with their bytes, which are valid until the next call.

        Messages of the same pieces share their bytes, so that what a device sends to many takes memory once.
        """
        keys = [tuple((piece.name, piece.slice, piece.dtype) for piece in message.pieces) for message in messages]
        sizes = {key: -(-message.size // ALIGNMENT) * ALIGNMENT for key, message in zip(keys, messages, strict=True)}
        if sum(sizes.values()) > self._staging.numel():
            self.close()  # before the larger memory is allocated
            self._staging = torch.empty(sum(sizes.values()), dtype=torch.uint8, device=self._on)
        offset, filled = 0, []
        written: dict[object, torch.Tensor] = {}
        for key, message in zip(keys, messages, strict=True):
            if key not in written:
                written[key] = data = self._staging[offset : offset + message.size]
                for piece in message.pieces:
                    shards.write(piece, piece.view(data, message.begin))
                offset += sizes[key]
            filled.append((message, written[key]))
            self.traffic.sent += message.size
        return filled

    def digests(self, now: Round, shards: Shards, shapes: Mapping[str, tuple[int, ...]]) -> list[Digest]:
        """Return the digests of all pieces of the round that come from this device, taken from its shards."""
        digests: list[Digest] = []
        for message in now.messages:
            for piece in message.pieces if message.source == self.device else ():
                value = torch.empty(piece.slice.extents, dtype=piece.dtype, device=self._on)
                shards.write(piece, value)
                digests.append(
                    (message.target, piece.name, piece.slice, digest(value, piece.slice, shapes[piece.name]))
                )
        return digests

    def _keep(self, message: Message, shards: Shards, bucket: torch.Tensor) -> None:
        for piece in message.pieces:
            shards.write(piece, piece.view(bucket))
        self.traffic.reused += message.size

    def _operation(self, operation: object, data: torch.Tensor, peer: int) -> dist.P2POp:
        rank = peer if self._group is None else dist.get_global_rank(self._group, peer)
        return dist.P2POp(operation, data, rank, self._group)  # type: ignore[arg-type]
