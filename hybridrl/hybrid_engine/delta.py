"""Sends only the elements that have changed since a process was sent the same piece last.

The sender keeps, in main memory, the bits of each piece that it sent last, and compares them with those of today. The
receiving process keeps the same pieces and completes what arrives, so that its engine loads what it would have loaded
of a full transfer, bit for bit.

A piece travels in the shortest of these forms:

    same    nothing
    index   the changed elements, and the number of each in the piece (4 bytes)
    mask    the changed elements, and a bit per element of the piece
    whole   all elements; also where the receiver does not have what the sender compared with
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from hybridrl.errors import RolloutError
from hybridrl.hybrid_engine.schedule import Message, TransferPiece
from hybridrl.layouts.digest import INTEGERS
from hybridrl.layouts.slices import TensorSlice

Form = Literal["same", "index", "mask", "whole"]
#: a process of an engine: the start of its replica (`Target.incarnation`), and its number there
Receiver = tuple[str, int]

_ALIGNMENT = 8  # bytes; that of the widest element
_INDEX = 4  # bytes of an element's number
_MOST_INDEXED = 2**31
#: transfers after which a replica that took no part in them counts as gone
_REMEMBERED = 8


class DeltaForm(NamedTuple):
    """Form in which a piece travels.

    Attributes:
        form: see the module.
        changed: number of changed elements, of `index` and `mask`.
    """

    form: Form
    changed: int = 0


WHOLE, SAME = DeltaForm("whole"), DeltaForm("same")


def size_of(change: DeltaForm, piece: TransferPiece) -> int:
    """The bytes that a piece takes on the wire."""
    return sum(_wire_bytes(change, piece))


def _wire_bytes(change: DeltaForm, piece: TransferPiece) -> tuple[int, int]:
    """Return the bytes of the elements' positions, and those of the elements."""
    if change.form == "same":
        return 0, 0
    if change.form == "whole":
        return 0, _aligned(piece.size)
    elements = piece.slice.elements
    places = change.changed * _INDEX if change.form == "index" else -(-elements // 8)
    return _aligned(places), _aligned(change.changed * piece.dtype.itemsize)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _shortest(count: int, piece: TransferPiece) -> DeltaForm:
    if count == 0:
        return SAME
    forms = [WHOLE, DeltaForm("mask", count)]
    if piece.slice.elements < _MOST_INDEXED:
        forms.append(DeltaForm("index", count))
    return min(forms, key=lambda change: size_of(change, piece))


def _bits(value: torch.Tensor) -> torch.Tensor:
    """The elements in a row, as integers: NaN equals itself, and 0 differs from -0."""
    return value.contiguous().view(-1).view(INTEGERS[value.dtype.itemsize])


_POWERS = (1, 2, 4, 8, 16, 32, 64, 128)


def encode(value: torch.Tensor, before: torch.Tensor, piece: TransferPiece) -> tuple[DeltaForm, torch.Tensor]:
    """Return how a piece travels, and its bytes.

    Args:
        value: its elements.
        before: those that the receiver has.
        piece: their place and dtype.
    """
    bits = _bits(value)
    changed = bits != _bits(before).to(bits.device)
    change = _shortest(int(changed.sum()), piece)
    data = torch.zeros(size_of(change, piece), dtype=torch.uint8, device=value.device)
    if change.form == "whole":
        data[: piece.size] = bits.view(torch.uint8)
    elif change.form != "same":
        places, _ = _wire_bytes(change, piece)
        if change.form == "index":
            data[: change.changed * _INDEX] = changed.nonzero().view(-1).to(torch.int32).view(torch.uint8)
        else:
            rows = torch.nn.functional.pad(changed, (0, -len(changed) % 8)).view(-1, 8).to(torch.uint8)
            powers = torch.tensor(_POWERS, dtype=torch.uint8, device=value.device)
            data[: len(rows)] = (rows * powers).sum(1, dtype=torch.uint8)
        elements = bits[changed].view(torch.uint8)
        data[places : places + elements.numel()] = elements
    return change, data


def decode(target: torch.Tensor, change: DeltaForm, data: torch.Tensor, piece: TransferPiece) -> None:
    """Turn a piece that the receiver has into that which was sent.

    Args:
        target: the elements before; overwritten.
        change, data: what `encode` has returned.
        piece: their place and dtype.
    """
    bits = _bits(target)
    if change.form == "whole":
        bits.copy_(data[: piece.size].view(bits.dtype))
    elif change.form != "same":
        places, _ = _wire_bytes(change, piece)
        elements = data[places : places + change.changed * piece.dtype.itemsize].view(bits.dtype)
        if change.form == "index":
            bits[data[: change.changed * _INDEX].view(torch.int32).long()] = elements
        else:
            powers = torch.tensor(_POWERS, dtype=torch.uint8, device=data.device)
            rows = data[: -(-len(bits) // 8)].unsqueeze(1) & powers
            bits[rows.view(-1)[: len(bits)] != 0] = elements


@dataclass
class _Sent:
    """A piece as it was sent last, and the transfer in which each receiver got it."""

    value: torch.Tensor
    receivers: dict[Receiver, int] = field(default_factory=dict)


class SentPieces:
    """Pieces that a rank has sent, in main memory. A piece that several processes get is kept once."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, TensorSlice], _Sent] = {}
        self._transfer = 0
        self._last: dict[str, int] = {}  # each replica's last complete transfer, known by all ranks
        self._previous: dict[tuple[str, TensorSlice], tuple[_Sent | None, DeltaForm, torch.Tensor]] = {}

    def begin(self) -> None:
        """Begin a transfer."""
        self._transfer += 1

    def begin_round(self) -> None:
        """Begin a round: all messages with the same piece are in one."""
        self._previous = {}

    def encode(self, message: Message, data: torch.Tensor, receiver: Receiver) -> tuple[list[DeltaForm], torch.Tensor]:
        """Return how each piece of a message travels, and the bytes to send.

        Args:
            message: to the receiver.
            data: its bytes in full.
            receiver: the process that it goes to.
        """
        changes, encoded = [], []
        for piece in message.pieces:
            value = piece.view(data, message.begin)
            before, change, short = self._compared(piece, value)
            if before is None or receiver not in before.receivers:
                change, short = WHOLE, torch.nn.functional.pad(_bits(value).view(torch.uint8), (0, -piece.size % 8))
            changes.append(change)
            encoded.append(short)
        for piece in message.pieces:
            self._sent[piece.name, piece.slice].receivers[receiver] = self._transfer
        return changes, torch.cat(encoded) if encoded else data[:0]

    def _compared(self, piece: TransferPiece, value: torch.Tensor) -> tuple[_Sent | None, DeltaForm, torch.Tensor]:
        """Compare a piece with what was sent last, once per round; what was sent last is now `value`."""
        key = piece.name, piece.slice
        if key not in self._previous:
            before = self._sent.get(key)
            change, data = (WHOLE, value) if before is None else encode(value, before.value, piece)
            if before is None or change != SAME:
                self._sent[key] = _Sent(value.to("cpu", copy=True))
            else:  # receivers of former transfers still have it, but not those that this one adds
                self._sent[key] = _Sent(before.value, dict(before.receivers))
            self._previous[key] = before, change, data
        return self._previous[key]

    def end(self, replicas: Sequence[str]) -> None:
        """End a transfer to these replicas: forget receivers that got a piece from another rank in between."""
        self._previous = {}
        self._last |= dict.fromkeys(replicas, self._transfer)
        self._last = {name: at for name, at in self._last.items() if self._transfer - at < _REMEMBERED}
        remaining = {}
        for key, sent in self._sent.items():
            sent.receivers = {who: at for who, at in sent.receivers.items() if self._last.get(who[0]) == at}
            if sent.receivers:
                remaining[key] = sent
        self._sent = remaining

    def forget(self) -> None:
        """A transfer has failed: the next one sends everything."""
        self._sent, self._last, self._previous = {}, {}, {}


class ReceivedPieces:
    """Pieces that a process of an engine received last, in main memory."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, TensorSlice], torch.Tensor] = {}
        self._arrived: set[tuple[str, TensorSlice]] = set()

    def complete(
        self, message: Message, changes: Sequence[DeltaForm], data: torch.Tensor, bucket: torch.Tensor
    ) -> None:
        """Write a message in full into the bucket.

        Args:
            message: whose pieces arrive.
            changes: how each travels.
            data: the bytes that have arrived.
            bucket: that of this process.

        Raises:
            RolloutError: the sender takes for granted what this process was never sent.
        """
        offset = 0
        for piece, change in zip(message.pieces, changes, strict=True):
            key, target = (piece.name, piece.slice), piece.view(bucket)
            if change.form != "whole":
                if key not in self._pieces:
                    raise RolloutError(
                        f"{piece.name}: only what has changed of {piece.slice} was sent, and this process has no "
                        "former value; set actor_rollout_ref.rollout.checkpoint_engine.delta=false, and report this"
                    )
                target.copy_(self._pieces[key])
            size = size_of(change, piece)
            decode(target, change, data[offset : offset + size], piece)
            offset += size
            self._arrived.add(key)
            if change != SAME:
                self._pieces[key] = target.to("cpu", copy=True)

    def end(self) -> None:
        """The transfer is complete: forget what it did not bring."""
        self._pieces = {key: value for key, value in self._pieces.items() if key in self._arrived}
        self._arrived = set()


def arriving(messages: Sequence[Message], changes: Mapping[int, Sequence[DeltaForm]]) -> list[int]:
    """Return the bytes that arrive of each message to a process.

    Args:
        messages: to the process.
        changes: how their pieces travel, by the message's source.
    """
    return [sum(map(size_of, changes[message.source], message.pieces)) for message in messages]
