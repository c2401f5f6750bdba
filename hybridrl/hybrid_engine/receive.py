"""The receiving side of a weight update, inside each process of a generation engine. Imports torch alone."""

from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from typing import Any

import torch

from hybridrl.hybrid_engine.messages import Bucket


class WeightReceiver:
    """Opens buckets and gives out the tensors in them.

    The sender overwrites a bucket once it is told that the bucket was taken, and engines keep tensors until a layer is
    complete. So the bytes are copied once, which also lets the sender fill the next bucket while this one is loaded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._segments: dict[str, shared_memory.SharedMemory] = {}

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of each parameter, on the device, in memory of their own."""
        data = self._bytes(bucket)
        for entry in bucket.entries:
            part = data[entry.offset : entry.offset + entry.size]
            yield entry.name, part.view(getattr(torch, entry.dtype)).view(entry.shape)

    def close(self) -> None:
        """Let go of what was opened."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def _bytes(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's bytes, copied."""
        readers: dict[str, Any] = {"shared_memory": self._from_shared_memory, "cuda_ipc": self._from_cuda_ipc}
        size = max((entry.offset + entry.size for entry in bucket.entries), default=0)
        data: torch.Tensor = readers[bucket.lane](bucket.where, size)
        return data

    def _from_shared_memory(self, name: str, size: int) -> torch.Tensor:
        if name not in self._segments:
            self.close()
            self._segments[name] = segment = shared_memory.SharedMemory(name=name)
            resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]  # the sender's
        return torch.frombuffer(self._segments[name].buf, dtype=torch.uint8, count=size).to(self.device, copy=True)

    def _from_cuda_ipc(self, where: dict[str, Any], size: int) -> torch.Tensor:
        from hybridrl.utils.device import device_uuid, open_ipc

        return open_ipc(where[device_uuid(self.device)])[:size].clone()
