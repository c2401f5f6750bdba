"""Weights from one process into another: every parameter whole and once, and nothing left behind."""

import os
import sys

import pytest
import ray
import torch
from raising import raises_with
from ray.exceptions import RayActorError

from hybridrl.hybrid_engine.receive import WeightReceiver
from hybridrl.hybrid_engine.stream import stream
from hybridrl.hybrid_engine.transports import BroadcastTransport, SharedMemoryTransport, UpdateTarget, transports_to

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Taker:
    """A process that keeps what it receives, as an engine's does."""

    def __init__(self, copies: bool) -> None:
        self.receiver = WeightReceiver(torch.device("cpu"), copies=copies)
        self.taken: list[tuple[str, torch.Tensor]] = []
        self.buckets: list[int] = []

    def end_at(self, count: int) -> None:
        """End the process with this bucket."""
        self.last = count

    def load_bucket(self, bucket) -> None:
        if len(self.buckets) + 1 == getattr(self, "last", None):
            os._exit(1)
        kept = [
            (name, value if self.receiver.copies else value.clone()) for name, value in self.receiver.tensors(bucket)
        ]
        self.taken += kept
        if bucket.entries:
            self.buckets.append(max(entry.offset + entry.size for entry in bucket.entries))

    def result(self):
        taken, buckets, self.taken, self.buckets = self.taken, self.buckets, [], []
        return taken, buckets


@pytest.fixture(scope="module")
def takers(ray_session):
    actor = ray.remote(Taker)
    yield [actor.options(num_cpus=0).remote(copies) for copies in (True, False)]


def weights() -> list[tuple[str, torch.Tensor]]:
    """Parameters of odd sizes, kinds and layouts; one is larger than the buckets below."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return [
        ("large", noise(300, 70)),
        ("bfloat16", noise(33, 7).to(torch.bfloat16)),
        ("scalar", noise()),
        ("transposed", noise(40, 30).t()),
        ("half", noise(5).half()),
        ("bytes", torch.arange(7, dtype=torch.uint8)),
        *((f"layer.{i}", noise(64, 64)) for i in range(12)),
        ("parameter", torch.nn.Parameter(noise(3, 3))),
    ]


def total(found: list[tuple[str, torch.Tensor]]) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in found)


def assert_taken(taker, sent: list[tuple[str, torch.Tensor]], largest: int) -> int:
    taken, buckets = ray.get(taker.result.remote())
    assert [name for name, _ in taken] == [name for name, _ in sent]
    for (name, value), (_, expected) in zip(taken, sent, strict=True):
        assert value.dtype == expected.dtype and value.shape == expected.shape, name
        assert torch.equal(value, expected.detach()), name
    assert max(buckets) <= largest
    return len(buckets)


@pytest.mark.parametrize("bucket", [1024, 20_000, 2**20])
def test_shared_memory_brings_everything_once_in_order_and_is_freed(takers, bucket, monkeypatch) -> None:
    monkeypatch.setattr("hybridrl.hybrid_engine.transports.LEAST_BUCKET", 1)
    sent = weights()
    before = set(os.listdir("/dev/shm"))
    targets = [UpdateTarget(taker, str(i), "node", (0,), 1) for i, taker in enumerate(takers)]
    (transport,) = transports_to(targets, "node")
    assert isinstance(transport, SharedMemoryTransport)
    names: set[str] = set()
    announce = transport._announce
    monkeypatch.setattr(
        transport,
        "_announce",
        lambda slot, entries: (names.update(s.name for s in transport._segments), announce(slot, entries))[1],
    )
    report = stream(iter(sent), [transport], total(sent), bucket)
    assert report.bytes == total(sent)
    for taker in takers:
        assert assert_taken(taker, sent, max(bucket, 300 * 70 * 4)) == report.buckets
    assert names and not names & (set(os.listdir("/dev/shm")) - before)


def test_a_broadcast_reaches_processes_of_their_own_and_its_group_is_kept(takers) -> None:
    sent = weights()
    targets = [UpdateTarget(taker, f"own {i}", "elsewhere", (), 1) for i, taker in enumerate(takers)]
    ports = set()
    for _ in range(2):
        (transport,) = transports_to(targets, "node")
        assert isinstance(transport, BroadcastTransport)
        stream(iter(sent), [transport], total(sent), 2**20)
        for taker in takers:
            assert_taken(taker, sent, 2**20)
        ports.add(BroadcastTransport.cached_group[1].port)
    assert len(ports) == 1
    (transport,) = transports_to(targets[:1], "node")  # other members, another group
    stream(iter(sent), [transport], total(sent), 2**20)
    assert_taken(takers[0], sent, 2**20)
    assert BroadcastTransport.cached_group[1].port not in ports


def test_all_engines_of_a_broadcast_that_fails_start_anew(ray_session, monkeypatch) -> None:
    """The others may have got all of the bucket at which one died, and then never hear of the rest."""
    monkeypatch.setattr("hybridrl.hybrid_engine.transports.LEAST_BUCKET", 1)
    actor = ray.remote(Taker).options(num_cpus=0)
    engines = [actor.remote(True) for _ in range(2)]
    ray.get(engines[1].end_at.remote(3))
    targets = [UpdateTarget(engine, f"dying {i}", "elsewhere", (), 1) for i, engine in enumerate(engines)]
    sent = weights()
    stream(iter(sent), transports_to(targets, "node"), total(sent), 20_000)
    for engine in engines:
        with pytest.raises(RayActorError):
            ray.get(engine.result.remote())


def test_an_engine_that_is_gone_does_not_stop_the_others(ray_session, takers) -> None:
    gone = ray.remote(Taker).options(num_cpus=0).remote(True)
    ray.get(gone.result.remote())
    ray.kill(gone)
    sent = weights()
    targets = [UpdateTarget(taker, str(i), "node", (0,), 1) for i, taker in enumerate([gone, takers[0]])]
    stream(iter(sent), transports_to(targets, "node"), total(sent), 4096)
    assert_taken(takers[0], sent, 300 * 70 * 4)


def test_too_little_shared_memory_says_what_to_change(takers, monkeypatch) -> None:
    small = os.statvfs_result((4096, 4096, 10, 10, 10, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    target = UpdateTarget(takers[0], "0", "node", (0,), 1)
    with raises_with(MemoryError, "update_weights_bucket_megabytes"):
        stream(iter(weights()), transports_to([target], "node"), 2**20, 2**20)
