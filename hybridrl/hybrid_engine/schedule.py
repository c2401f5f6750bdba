"""The schedule: a plan divided into rounds, each of which fits into a bucket on every device.

In a round, each device sends at most one message to each other device. A message is a run of bytes in the receiver's
bucket; its pieces are slices of tensors, one after another. What a device keeps is a message to itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hybridrl.hybrid_engine.plan import Plan, TensorPlan, common
from hybridrl.layouts.slices import TensorSlice, TensorSlices

ALIGNMENT = 16  # bytes; more than any dtype requires


@dataclass(frozen=True, slots=True)
class TransferPiece:
    """A slice of a tensor in a bucket.

    Attributes:
        name: of the tensor.
        slice: its elements, in row-major order.
        dtype: in which they travel.
        offset: of the first byte in the receiver's bucket.
    """

    name: str
    slice: TensorSlice
    dtype: torch.dtype
    offset: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.slice.elements * self.dtype.itemsize

    def view(self, data: torch.Tensor, origin: int = 0) -> torch.Tensor:
        """Return the piece within bytes that begin at offset `origin` of the bucket."""
        begin = self.offset - origin
        return data[begin : begin + self.size].view(self.dtype).view(self.slice.extents)


@dataclass(frozen=True, slots=True)
class Message:
    """Message from `source` to `target` in a round; bytes `begin` to `end` of the target's bucket."""

    source: int
    target: int
    begin: int
    end: int
    pieces: tuple[TransferPiece, ...]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Round:
    """A part of the transfer.

    Attributes:
        names: the tensors that it brings, in the plan's order.
        messages: those that concern the devices that the schedule was made for, ordered by target and source.
        bucket: bytes of the largest bucket that a device fills.
    """

    names: tuple[str, ...]
    messages: tuple[Message, ...]
    bucket: int

    def sent_by(self, device: int) -> list[Message]:
        """The messages that a device sends to others."""
        return [message for message in self.messages if message.source == device != message.target]

    def received_by(self, device: int) -> list[Message]:
        """The messages that a device gets, what it keeps included."""
        return [message for message in self.messages if message.target == device]


@dataclass
class _Open:
    """The round that is being filled."""

    names: list[str] = field(default_factory=list)
    pieces: dict[tuple[int, int], list[tuple[str, TensorSlice, torch.dtype]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    needed: np.ndarray | int = 0
    sent: np.ndarray | int = 0


def schedule(
    transition: Plan,
    training_slices: Sequence[Mapping[str, TensorSlices]],
    generation_slices: Sequence[Mapping[str, TensorSlices]],
    dtypes: Mapping[str, torch.dtype],
    bucket_bytes: int,
    devices: Collection[int] | None = None,
) -> list[Round]:
    """Divide a plan into rounds.

    A tensor is never divided over rounds, so that a bucket grows to the largest part of one tensor that a device needs.
    All devices get the same rounds.

    Args:
        transition: a plan of `plan_slices`, in which device i has place i.
        training_slices, generation_slices: the slices that the plan was made from.
        dtypes: of each tensor on the wire.
        bucket_bytes: what no device receives or sends more than in a round, unless a single tensor is larger.
        devices: the messages from and to these are listed; None: all.
    """
    listed = set(range(len(training_slices))) if devices is None else set(devices)
    return list(_rounds(transition, training_slices, generation_slices, dtypes, bucket_bytes, listed))


def _rounds(
    transition: Plan,
    training_slices: Sequence[Mapping[str, TensorSlices]],
    generation_slices: Sequence[Mapping[str, TensorSlices]],
    dtypes: Mapping[str, torch.dtype],
    bucket_bytes: int,
    devices: set[int],
) -> Iterator[Round]:
    now = _Open()
    for name, tensor in transition.tensors:
        if not tensor.needed.any():
            continue
        dtype = dtypes[name]
        more, out = tensor.needed * dtype.itemsize, tensor.sent * dtype.itemsize
        if now.names and max(int((now.needed + more).max()), int((now.sent + out).max())) > bucket_bytes:
            yield _close(now)
            now = _Open()
        now.names.append(name)
        now.needed, now.sent = now.needed + more, now.sent + out
        for source, target, tensor_slice in _moves(name, tensor, training_slices, generation_slices, devices):
            now.pieces[target, source].append((name, tensor_slice, dtype))
    if now.names:
        yield _close(now)


def _moves(
    name: str,
    tensor: TensorPlan,
    training_slices: Sequence[Mapping[str, TensorSlices]],
    generation_slices: Sequence[Mapping[str, TensorSlices]],
    devices: set[int],
) -> Iterator[tuple[int, int, TensorSlice]]:
    for device in sorted(devices):
        if tensor.reused[device]:
            for tensor_slice in common(training_slices[device][name], generation_slices[device][name]):
                yield device, device, tensor_slice
    for route in tensor.routes:
        for target in route.targets:
            if target in devices or route.source in devices:
                yield route.source, target, route.slice


def _close(now: _Open) -> Round:
    messages = []
    offsets: dict[int, int] = defaultdict(int)
    for target, source in sorted(now.pieces):
        offset = begin = -(-offsets[target] // ALIGNMENT) * ALIGNMENT
        pieces = []
        # The widest first, so that each lies at a multiple of its element size without gaps.
        for name, tensor_slice, dtype in sorted(now.pieces[target, source], key=lambda piece: -piece[2].itemsize):
            pieces.append(TransferPiece(name, tensor_slice, dtype, offset))
            offset += pieces[-1].size
        messages.append(Message(source, target, begin, offset, tuple(pieces)))
        offsets[target] = offset
    gaps = ALIGNMENT * len(np.atleast_1d(now.needed))  # one before each message
    return Round(tuple(now.names), tuple(messages), int(np.max(now.needed)) + gaps)
