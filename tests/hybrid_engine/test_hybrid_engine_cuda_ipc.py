"""Which memory two ranks share with engines on their devices, with a record in place of CUDA's handles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import spawn
from ray.exceptions import RayActorError, RayTaskError

from hybridrl.hybrid_engine import transports
from hybridrl.hybrid_engine.send_shards import ShardSender
from hybridrl.hybrid_engine.stream import stream
from hybridrl.hybrid_engine.transports import CudaIpcTransport, SharedMemoryTransport, UpdateTarget, transports_to
from hybridrl.utils import device, distributed

KIB = 1024


class Record:
    """In place of `device.SharedMemory`: what was shared, and what was taken back."""

    shared = reclaimed = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        Record.shared += 1
        assert tensor.device.type != "meta"
        self.handle = f"rank {distributed.get_rank()}".encode()

    def reclaim(self) -> None:
        Record.reclaimed += 1


class Engine:
    """A replica's actor that dies when it gets bucket number `dies_at`, and refuses number `refuses_at`."""

    def __init__(self, dies_at: int | None = None, refuses_at: int | None = None) -> None:
        self.dies_at, self.refuses_at = dies_at, refuses_at
        self.buckets: list[Any] = []
        self.load_bucket = SimpleNamespace(remote=self.load)

    def load(self, bucket: Any) -> Any:
        self.buckets.append(bucket)
        if self.refuses_at == len(self.buckets):
            return RayTaskError("load_bucket", "no such parameter", ValueError("no such parameter"))
        return RayActorError() if self.dies_at is not None and len(self.buckets) >= self.dies_at else None


def answer(ack: Exception | None) -> None:
    if ack is not None:
        raise ack


def transfer(rank: int, engines: dict[tuple[int, ...], Engine], weights: int) -> tuple[int, int]:
    """How many buffers this rank shared and took back while it sent so many weights of 1 KiB."""
    Record.shared = Record.reclaimed = 0
    targets = [UpdateTarget(engine, str(ranks), "node", ranks, 1) for ranks, engine in engines.items()]
    tensors = [(f"weight {i}", torch.full((KIB // 4,), float(i))) for i in range(weights)]
    stream(iter(tensors), [CudaIpcTransport(targets)], weights * KIB, 2 * KIB)
    return Record.shared, Record.reclaimed


def on_each_rank(rank: int) -> None:
    device.SharedMemory = Record  # type: ignore[misc]
    device.uuid_of = lambda here: f"GPU {rank}"
    transports.ray = SimpleNamespace(get=answer)
    transports.LEAST_BUCKET = 2 * KIB

    only_one = Engine()
    assert transfer(rank, {(0,): only_one}, 9) == ((2, 0) if rank == 0 else (0, 0))
    assert rank or all(set(bucket.where) == {"GPU 0"} for bucket in only_one.buckets if bucket.entries)

    of_both = Engine()
    assert transfer(rank, {(0, 1): of_both}, 2) == (1, 0)  # everything fits one bucket
    assert rank or [set(bucket.where) for bucket in of_both.buckets if bucket.entries] == [{"GPU 0", "GPU 1"}]

    # Only the first rank of an engine talks to it, and both shared memory with it.
    assert transfer(rank, {(0, 1): Engine(dies_at=3)}, 9) == (2, 2)
    assert transfer(rank, {(0,): Engine(), (1,): Engine(dies_at=2)}, 9) == ((2, 0) if rank == 0 else (2, 2))

    # An engine that refuses a bucket fails the update on every rank, and each frees its buffers.
    closed: list[int] = []
    close = CudaIpcTransport.close
    CudaIpcTransport.close = lambda transport: (closed.append(len(transport._buffers)), close(transport))[1]  # type: ignore[method-assign]
    with pytest.raises(RayTaskError if rank == 0 else RuntimeError, match="no such parameter" if rank == 0 else "rank"):
        transfer(rank, {(0,): Engine(refuses_at=2), (1,): Engine()}, 9)
    assert closed == [0, 2]

    without_ipc(rank)
    distributed.barrier()  # no rank is one collective behind


def without_ipc(rank: int) -> None:
    """The GPU of one rank cannot be shared: all send through main memory, and streamed."""
    told: list[str] = []
    device.is_gpu = lambda: True
    device.memory_sharing_unsupported_reason = lambda: "not supported" if rank == 1 else None
    transports.notify = lambda text, level: told.append(f"{level}: {text}")
    targets = [UpdateTarget(Engine(), str(number), "node", (number,), 1) for number in range(2)]
    for _ in range(2):
        assert [type(transport) for transport in transports_to(targets, "node")] == (
            [SharedMemoryTransport] if rank == 0 else []
        )
    assert len(told) == (rank == 0) and all("/dev/shm" in text and "not supported" in text for text in told)
    assert "not supported" in str(ShardSender(None, KIB).unsupported_reason(iter(()), targets))


@pytest.mark.slow
def test_memory_is_shared_only_with_engines_that_open_it() -> None:
    spawn(on_each_rank, 2)
