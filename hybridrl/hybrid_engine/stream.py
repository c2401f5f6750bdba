"""Streams the training weights to running generation engines, in buckets of whole parameters under their HF names.

All training ranks iterate over the whole parameters together (this gathers them), and some ranks write the parameters
into a bucket that engines read:

    same node, CPU    shared memory; the first rank of each node writes, every engine process there reads
    same GPU          CUDA IPC; each rank writes on its device, the engine's process there reads
    other devices     broadcast from rank 0 to all engine processes, over gloo or NCCL

A bucket is sent while the previous one is being loaded. Besides the shards and the engines' own weights, a device
therefore holds at most two buckets and the parameter that is being gathered and cast. A parameter is never split; a
bucket grows to the size of the largest one.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from hybridrl.hybrid_engine.buckets import BucketEntry
from hybridrl.hybrid_engine.transports import Transport, UpdateTarget, pipelined_bucket
from hybridrl.utils import distributed

_ALIGNMENT = 512  # bytes; more than any dtype or vector load requires


@dataclass(frozen=True)
class TransferReport:
    """Report of one rank's transfer.

    Attributes:
        bytes: of the weights. Streamed, each parameter counts once, and a rank that sends nothing itself has 0. By a
            plan, the parts for the engine's process on the same device, or those sent to engines on other devices.
        received: of these, the bytes that came from other training ranks. Streamed, they are not counted: -1.
        saved: what a full transfer would have sent in addition; None where all is sent.
    """

    bytes: int
    seconds: float
    buckets: int
    received: int = -1
    saved: int | None = None


def send_adapter(
    config: str, tensors: Iterable[tuple[str, torch.Tensor]], targets: Sequence[UpdateTarget]
) -> TransferReport:
    """Send an adapter (LoRA) to engines that have its base, through Ray's object store: it is small.

    Args:
        config: PEFT's `adapter_config.json`.
        tensors: whole, by their names in PEFT's files; every rank iterates to the end, and the first one sends.
    """
    started = time.perf_counter()
    sends = distributed.get_rank() == 0
    host_tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors if sends}
    if not sends:
        return TransferReport(0, time.perf_counter() - started, 0)
    shared = ray.put(host_tensors)
    for answer in [target.replica.load_adapter.remote(config, shared) for target in targets]:
        try:
            ray.get(answer)
        except RayTaskError:
            raise
        except RayError:  # the replica is gone; the process that started it notices too
            continue
    sent = sum(tensor.nbytes for tensor in host_tensors.values())
    return TransferReport(sent, time.perf_counter() - started, 1)


def stream(
    weights: Iterable[tuple[str, torch.Tensor]], transports: Sequence[Transport], total_bytes: int, bucket_bytes: int
) -> TransferReport:
    """Send `weights` through every transport.

    Args:
        weights: name and whole value of each parameter; every rank iterates to the end.
        transports: empty on a rank that only gathers.
        total_bytes: size of all weights together.
        bucket_bytes: maximum size of a bucket, unless a single parameter is larger.
    """
    started = time.perf_counter()
    packer = _Packer(transports, min(bucket_bytes, pipelined_bucket(total_bytes), total_bytes))
    try:
        for name, tensor in weights:
            if transports:
                packer.add(name, tensor.detach())
        packer.flush()
        for transport in transports:
            transport.finish()
    except BaseException:
        for transport in transports:
            transport.close()
        raise
    return TransferReport(packer.bytes, time.perf_counter() - started, packer.buckets)


class _Packer:
    """Packs parameters one after another into buckets."""

    def __init__(self, transports: Sequence[Transport], bucket_bytes: int) -> None:
        self.transports = transports
        self.bucket_bytes = bucket_bytes
        self.bytes = self.buckets = 0
        self._entries: list[BucketEntry] = []
        self._buffers: list[torch.Tensor] = []
        self._offset = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        flat = tensor.reshape(-1).view(torch.uint8)
        size = flat.numel()
        if self._entries and self._offset + size > self._buffers[0].numel():
            self.flush()
        if not self._entries:
            self._buffers = [transport.reserve(max(self.bucket_bytes, size)) for transport in self.transports]
        for buffer in self._buffers:
            buffer[self._offset : self._offset + size].copy_(flat)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._entries.append(BucketEntry(name, dtype, tuple(tensor.shape), self._offset, size))
        self.bytes += size
        self._offset += -(-size // _ALIGNMENT) * _ALIGNMENT

    def flush(self) -> None:
        self._buffers = []
        if self._entries:
            for transport in self.transports:
                transport.send(tuple(self._entries))
            self.buckets += 1
        self._entries, self._offset = [], 0
