"""Descriptions of buckets, from the sender of weights to receivers. They are small; the weights go elsewhere."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hybridrl.hybrid_engine.delta import DeltaForm
from hybridrl.hybrid_engine.schedule import Message
from hybridrl.layouts.slices import TensorSlice, TensorSlices

TransportKind = Literal["shared_memory", "cuda_ipc", "broadcast", "point_to_point"]


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """The position of a tensor in a bucket.

    Attributes:
        name: the parameter's Hugging Face name.
        dtype: torch's name of the dtype, for example "bfloat16".
        shape: shape of the whole parameter.
        offset, size: offset and size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A group of parameters that is ready to be received.

    Attributes:
        transport: how the bytes travel.
        where: what a receiver needs to find the bytes. For shared memory, the segment's name. For CUDA IPC, how to open
            the buffer on each device, by the device's UUID. For broadcast, (host, port, world size, members) of the
            group, in which rank 0 sends, and the rank of the replica's first process.
        entries: the parameters in the bucket.
    """

    transport: TransportKind
    where: Any
    entries: tuple[BucketEntry, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors that training exports.

    Attributes:
        shapes: of each whole tensor, by its Hugging Face name, in the order in which they are sent.
        dtypes: of each, as it is sent.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]


@dataclass(frozen=True, slots=True)
class RequiredSlices:
    """The slices of a checkpoint that one process of an engine needs.

    Attributes:
        slices: of each tensor, in the order of the checkpoint.
        uses: how often the engine's loader copies each slice.
        whole: tensors that its loader does not just copy, with the reason; the process needs all of them.
    """

    slices: Mapping[str, TensorSlices]
    uses: Counter[tuple[str, TensorSlice]]
    whole: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ShardBucket:
    """A round of a planned transfer that is ready to be received, for all processes of an engine.

    Attributes:
        transport: how the bytes travel.
        where: what a receiver needs to find the bytes. For shared memory, the segment's name of each process. For CUDA
            IPC, how to open the buffer on each device, by the device's UUID. For point to point, (host, port, world
            size, members) of the group and the rank of the engine's first process.
        size: bytes of the bucket.
        names: the tensors that it brings.
        messages: of each process: what its bucket holds.
        digests: of each process: the digest of each piece by its tensor and slice; empty if they are not checked.
        changes: of each process: how the pieces of each message travel, by the message's source; empty if in full.
    """

    transport: TransportKind
    where: Any
    size: int
    names: tuple[str, ...]
    messages: tuple[tuple[Message, ...], ...]
    digests: tuple[Mapping[tuple[str, TensorSlice], int], ...] = ()
    changes: tuple[Mapping[int, tuple[DeltaForm, ...]], ...] = ()
