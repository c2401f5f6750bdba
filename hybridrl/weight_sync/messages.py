"""What sender and receiver of weights tell each other: small enough for any channel; the weights go elsewhere."""

from dataclasses import dataclass
from typing import Any, Literal

LaneKind = Literal["shared_memory", "cuda_ipc", "broadcast"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies in a bucket.

    Attributes:
        name: the parameter's Hugging Face name.
        dtype: torch's name of it, "bfloat16".
        shape: of the whole parameter.
        offset, size: in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some parameters, ready to be taken.

    Attributes:
        lane: how the bytes travel.
        where: what a receiver needs to find them. Shared memory: the segment's name. CUDA IPC: by the device's UUID,
            how to open the buffer there. Broadcast: (host, port, world size, members) of the group, in which rank 0
            sends, and the rank of the replica's first process.
        entries: what it holds.
    """

    lane: LaneKind
    where: Any
    entries: tuple[Entry, ...]
