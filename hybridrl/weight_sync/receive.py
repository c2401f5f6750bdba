"""The receiving side of a weight update, inside each process of a generation engine."""

import mmap
import pickle
from collections.abc import Iterator

import torch

from hybridrl.utils import device as devices
from hybridrl.utils.distributed import StandaloneGroup
from hybridrl.weight_sync.messages import Bucket

#: position of the device index among the arguments that `reduce_tensor` returns for a CUDA tensor
_STORAGE_DEVICE = 6


class WeightReceiver:
    """Opens buckets and yields the tensors in them.

    The sender overwrites a bucket once it is told that the bucket was received.

    Args:
        device: the device that this process computes on.
        rank: rank of this process within its replica.
        copies: whether to yield copies, for engines that keep references to the tensors they load.
    """

    def __init__(self, device: torch.device, rank: int = 0, copies: bool = True) -> None:
        self.device = device
        self.rank = rank
        self.copies = copies
        self._buffers: dict[str | bytes, torch.Tensor] = {}
        #: the bytes of the bucket that was opened last
        self.last: torch.Tensor | None = None
        self._group: tuple[tuple[str, int, int, str], StandaloneGroup] | None = None

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and value of each parameter.

        Without `copies` the values are views of the bucket, valid until the sender is told that it was received. A
        bucket without entries means that the sender is about to free its memory, so the opened buffers are released.
        """
        if not bucket.entries:
            self.close()
            return
        size = max((entry.offset + entry.size for entry in bucket.entries), default=0)
        if bucket.lane == "shared_memory":
            data = self._from_shared_memory(bucket.where, size)
        elif bucket.lane == "cuda_ipc":
            data = self._from_cuda_ipc(bucket.where, size)
        else:
            data = self._from_broadcast(bucket.where, size)
        if self.copies:
            data = data.clone()
        self.last = data
        for entry in bucket.entries:
            part = data[entry.offset : entry.offset + entry.size]
            yield entry.name, part.view(getattr(torch, entry.dtype)).view(entry.shape)

    def close(self) -> None:
        """Release the sender's memory. A broadcast group is kept for the next update."""
        self.last = None
        self._buffers.clear()
        devices.empty_cache()

    def _from_shared_memory(self, name: str, size: int) -> torch.Tensor:
        # Not multiprocessing's SharedMemory: it would track the segment here too, and unlink the sender's segment.
        if name not in self._buffers:
            with open(f"/dev/shm/{name}", "r+b") as file:
                self._buffers[name] = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        return self._buffers[name][:size].to(self.device)

    def _from_cuda_ipc(self, where: dict[str, bytes], size: int) -> torch.Tensor:
        handle = where[devices.uuid_of(self.device)]
        if handle not in self._buffers:
            rebuild, arguments = pickle.loads(handle)
            arguments = list(arguments)
            arguments[_STORAGE_DEVICE] = self.device.index  # the sender may number this device differently
            self._buffers[handle] = rebuild(*arguments)
        return self._buffers[handle][:size]

    def _from_broadcast(self, where: tuple[tuple[str, int, int, str], int], size: int) -> torch.Tensor:
        membership, first_rank = where
        host, port, world_size, _ = membership
        if self._group is None or self._group[0] != membership:
            group = StandaloneGroup(host, port, first_rank + self.rank, world_size, self.device)
            group.connect()
            self._group = membership, group
        data = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._group[1].broadcast(data, root=0)
        return data
