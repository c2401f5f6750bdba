"""Messages between sender and receiver of weights. They are small enough for any channel; the weights go elsewhere."""

from dataclasses import dataclass
from typing import Any, Literal

LaneKind = Literal["shared_memory", "cuda_ipc", "broadcast"]


@dataclass(frozen=True, slots=True)
class Entry:
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
        lane: the transport of the bytes.
        where: what a receiver needs to find the bytes. For shared memory, the segment's name. For CUDA IPC, how to open
            the buffer on each device, by the device's UUID. For broadcast, (host, port, world size, members) of the
            group, in which rank 0 sends, and the rank of the replica's first process.
        entries: the parameters in the bucket.
    """

    lane: LaneKind
    where: Any
    entries: tuple[Entry, ...]
