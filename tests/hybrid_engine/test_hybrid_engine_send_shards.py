"""Shards from a training process into engine processes of their own: each gets its part, and nothing is left behind."""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing import shared_memory
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ranks import spawn
from ray.exceptions import RayActorError

from hybridrl.engine.capabilities import WeightShard
from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.buckets import Checkpoint, RequiredSlices, ShardBucket
from hybridrl.hybrid_engine.receive import ShardReceiver, WeightReceiver
from hybridrl.hybrid_engine.send_shards import ShardSender, TrainingShards
from hybridrl.hybrid_engine.shard_transports import PointToPointTransport, ShardMemoryTransport
from hybridrl.hybrid_engine.transports import UpdateTarget
from hybridrl.layouts.slices import TensorSlice
from hybridrl.utils import distributed

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class HalfEngine:
    """An engine of one process that keeps half of the rows of each matrix, in bfloat16, and all of everything else."""

    def __init__(self, half: int = 0, takes_shards: bool = True) -> None:
        self.half, self.takes_shards = half, takes_shards
        self.parameters: dict[str, torch.Tensor] = {}
        self.asked = self.rounds = self.dies_at = 0
        self.shards = ShardReceiver(WeightReceiver(torch.device("cpu")), self.load)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "unused":
                continue
            if name == "turned":
                tensor = tensor.t().contiguous()  # which cannot be planned
            rows = len(tensor) // 2 if tensor.ndim > 1 else 0
            part = tensor[self.half * rows : (self.half + 1) * rows] if rows else tensor
            dtype = torch.float64 if name == "buffer" else torch.bfloat16
            self.parameters.setdefault(name, torch.zeros(part.shape, dtype=dtype)).copy_(part)

    def required_slices(self, checkpoint):
        self.asked += 1
        return [self.shards.require(checkpoint)] if self.takes_shards else None

    def die_at(self, number: int) -> None:
        self.dies_at = number

    def load_bucket(self, bucket) -> None:
        self.rounds += isinstance(bucket, ShardBucket)
        if self.rounds == self.dies_at:
            os._exit(1)
        if isinstance(bucket, ShardBucket):
            self.shards.load(bucket)
        else:
            assert not bucket.entries
            self.shards.receiver.close()

    def end(self):
        faults = self.shards.finish()
        return self.parameters, self.asked, faults


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"scalar": (), "turned": (6, 4), "unused": (5, 5), "norm": (9,), "large": (300, 70)}
    shapes |= {f"layers.{i}.w": (64, 32) for i in range(12)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return made | {"buffer": torch.randn(3, generator=generator).double()}


def shards(state: dict[str, torch.Tensor]) -> list[WeightShard]:
    """Matrices in two shards, as two rows of ranks would have them; all are on this process."""
    found = []
    for name, value in state.items():
        row = 0
        for part in value.chunk(2) if value.ndim > 1 else [value]:
            offsets = (row, *(0 for _ in value.shape[1:])) if value.ndim else ()
            found.append(WeightShard(name, tuple(value.shape), offsets, part, keeps_dtype=name == "buffer"))
            row += len(part) if value.ndim else 0
    return found


def assert_loaded(engine, state: dict[str, torch.Tensor], half: int) -> int:
    """Compare an engine's weights with a real load; returns how often it was asked what it needs."""
    found, asked, faults = ray.get(engine.end.remote())
    assert faults == []
    expected = HalfEngine(half)
    expected.load((name, value if name == "buffer" else value.bfloat16()) for name, value in state.items())
    assert found.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    return asked


@contextlib.contextmanager
def no_segment_left() -> Iterator[set[str]]:
    """Shared memory that this process creates in the block is gone after it. Other processes have theirs meanwhile.

    Yields:
        The names of what it has created so far.
    """
    create, names = shared_memory.SharedMemory, set[str]()

    def recorded(*arguments: Any, **keywords: Any) -> shared_memory.SharedMemory:
        segment = create(*arguments, **keywords)
        names.add(segment.name)
        return segment

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "SharedMemory", recorded)
        yield names
    assert not names & set(os.listdir("/dev/shm"))


@pytest.fixture
def small_buckets(monkeypatch) -> None:
    monkeypatch.setattr("hybridrl.hybrid_engine.transports.LEAST_BUCKET", 1)


def engines(*halves: int, **options) -> list:  # type: ignore[type-arg]
    actor = ray.remote(HalfEngine).options(num_cpus=0)
    return [actor.remote(half, **options) for half in halves]


def on_two_ranks(rank: int) -> None:
    monkeypatch = pytest.MonkeyPatch()
    try:
        assert distributed.broadcast_object({"of rank": rank}) == {"of rank": 0}

        # A model that one rank cannot export is streamed by all.
        def export():
            if rank == 1:
                raise ModelError("w is computed")
            yield from shards(weights(0))

        sender = ShardSender(None, 6000)
        assert [sender.unsupported_reason(export(), []) for _ in range(2)] == ["w is computed"] * 2

        # Ranks on one CPU share its memory.
        state = weights(0)
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        slices = {
            name: (TensorSlice((0,) * max(value.ndim, 1), shapes[name] or (1,)),) for name, value in state.items()
        }
        checkpoint = Checkpoint(shapes, dict.fromkeys(shapes, torch.bfloat16))
        uses = Counter((name, tensor_slice) for name, (tensor_slice,) in slices.items())
        target = UpdateTarget(None, "a", "node", (0, 1), 2)
        sender = ShardSender(None, 192_000)
        sender._training = TrainingShards(checkpoint, [slices, {}], [0, 0], ["node", "node"])
        sender._required["a"] = [RequiredSlices(slices, uses, {})] * 2
        rounds = sender._rounds([target])
        assert len(rounds) > 1 and max(now.bucket for now in rounds) <= 192_000 * 2 / 3 / 2

        # Too little memory on one rank is an error on both, before anybody writes.
        if rank == 1:
            monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=1))
        transport = ShardMemoryTransport([target], 2)
        with no_segment_left():
            refused = (
                pytest.raises(MemoryError, match="bucket")
                if rank
                else pytest.raises(RuntimeError, match="another rank")
            )
            with refused:
                transport.reserve(4096)
            transport.close()
            distributed.barrier()
    finally:
        monkeypatch.undo()


@pytest.mark.slow
def test_two_ranks_decide_alike_and_share_the_memory_of_their_node() -> None:
    spawn(on_two_ranks, 2)


@pytest.mark.parametrize("fails", ["load", "load and settle"])
def test_a_loader_that_fails_without_weights_gets_whole_tensors(fails: str) -> None:
    engine = HalfEngine()

    def load(named: Iterable[tuple[str, torch.Tensor]]) -> None:
        engine.load(
            (name, tensor if not tensor.is_meta else torch.from_numpy(tensor.numpy())) for name, tensor in named
        )

    def settle() -> None:
        if "settle" in fails and not engine.parameters:
            raise RuntimeError("a layer is half loaded")

    receiver = ShardReceiver(WeightReceiver(torch.device("cpu")), load, settle)
    found = receiver.require(Checkpoint({"w": (4, 2)}, {"w": torch.float32}))
    assert found.slices == {"w": (TensorSlice((0, 0), (4, 2)),)} and "without weights" in found.whole["w"]
    assert ("half loaded" in found.whole["w"]) == ("settle" in fails)


@pytest.mark.parametrize("bucket", [6000, 2**20])
def test_an_engine_on_the_same_device_gets_its_part_and_is_asked_once(
    ray_session, small_buckets, capfd, bucket
) -> None:
    (engine,) = engines(1)
    target = UpdateTarget(engine, "0-a", "node", (0,), 1)
    sender = ShardSender(torch.bfloat16, bucket, check=True)
    with no_segment_left() as created:
        for seed in range(2):
            state = weights(seed)
            assert sender.unsupported_reason(shards(state), [target]) is None
            report = sender.send(iter(shards(state)), [target])
            assert report.buckets > 5 and report.received == 0
            half_of = sum(value.numel() for name, value in state.items() if name not in ("unused", "buffer", "turned"))
            whole_ones = 1 + 9  # scalar and norm
            assert report.bytes == 2 * ((half_of - whole_ones) // 2 + whole_ones + 24) + 3 * 8
            assert assert_loaded(engine, state, 1) == 1
    assert created
    told = capfd.readouterr().err
    assert "by a plan" in told and "turned" in told and told.count("by a plan") == 1
    (restarted,) = engines(0)
    again = UpdateTarget(restarted, "0-b", "node", (0,), 1)
    state = weights(5)
    assert sender.unsupported_reason(shards(state), [again]) is None
    sender.send(shards(state), [again])
    assert assert_loaded(restarted, state, 0) == 1


def test_engines_on_their_own_devices_get_their_parts_point_to_point(ray_session, small_buckets) -> None:
    pair = engines(0, 1)
    targets = [UpdateTarget(engine, f"{half}-apart", "elsewhere", (), 1) for half, engine in enumerate(pair)]
    sender, ports = ShardSender(torch.bfloat16, 6000), set()
    for seed in range(2):
        state = weights(seed)
        assert sender.unsupported_reason(shards(state), targets) is None
        report = sender.send(shards(state), targets)
        assert report.buckets > 5 and report.received == 0 < report.bytes
        for half, engine in enumerate(pair):
            assert assert_loaded(engine, state, half) == 1
        assert PointToPointTransport.cached_group is not None
        ports.add(PointToPointTransport.cached_group[2].port)
    assert len(ports) == 1  # the group is kept


def test_all_engines_apart_are_restarted_if_one_dies_in_the_middle(ray_session, small_buckets) -> None:
    """The others may have got a round that they can no longer complete."""
    pair = engines(0, 1)
    ray.get(pair[1].die_at.remote(3))
    targets = [UpdateTarget(engine, f"{half}-dying", "elsewhere", (), 1) for half, engine in enumerate(pair)]
    sender, state = ShardSender(torch.bfloat16, 6000), weights(0)
    assert sender.unsupported_reason(shards(state), targets) is None
    sender.send(shards(state), targets)
    for engine in pair:
        with pytest.raises(RayActorError):
            ray.get(engine.end.remote())


def stepped(state: dict[str, torch.Tensor], seed: int, size: float) -> dict[str, torch.Tensor]:
    """The weights after a small step: with those of the first six layers frozen, and few others changed in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    frozen = {f"layers.{i}.w" for i in range(6)}
    noise = {name: size * torch.randn(value.shape, generator=generator).to(value) for name, value in state.items()}
    return {name: value if name in frozen else value + noise[name] for name, value in state.items()}


def test_only_what_has_changed_is_sent_and_gives_the_same_weights(ray_session, small_buckets) -> None:
    """Two engines of the same half and one of the other, through steps, absences and a restart."""
    halves = {"a": 0, "b": 1, "c": 0, "b, restarted": 1}
    actors = dict(zip(halves, engines(*halves.values()), strict=True))
    sender = ShardSender(torch.bfloat16, 6000, check=True, delta=True)

    def send(state: dict[str, torch.Tensor], *names: str) -> tuple[int, int | None]:
        """Returns the bytes sent, and the bytes saved."""
        targets = [UpdateTarget(actors[name], f"{name}, delta", "elsewhere", (), 1) for name in names]
        assert sender.unsupported_reason(shards(state), targets) is None
        report = sender.send(shards(state), targets)
        for name in names:
            assert_loaded(actors[name], state, halves[name])
        return report.bytes, report.saved

    # Of each engine: half of each matrix, all of the norm, the scalar and the tensor that is turned.
    most = 2 * (300 * 70 + 12 * 64 * 32) // 2 + 2 * (9 + 1 + 6 * 4) + 3 * 8
    state = weights(0)
    sent, saved = send(state, "a", "b", "c")
    assert 3 * most <= sent < 3 * most + 3 * 8 * 40 and saved == 3 * most - sent  # to multiples of 8
    assert send(state, "a", "b", "c") == (0, 3 * most)
    state["layers.9.w"] = state["layers.9.w"].clone()
    state["layers.9.w"][0, :5] = 9.0
    assert send(state, "a", "b", "c") == (2 * (24 + 16), 3 * most - 2 * (24 + 16))  # 5 numbers and 5 elements, padded
    state = stepped(state, 1, 1e-4)
    sent, saved = send(state, "a", "b", "c")
    assert saved == 3 * most - sent and 0 < sent < most

    # One that was left out gets all of the tensors that have changed meanwhile, the others what has changed.
    state = stepped(state, 2, 1e-4)
    sent, _ = send(state, "a", "b")
    assert sent < most / 2
    state = stepped(state, 3, 1e-4)
    sent, _ = send(state, "a", "b", "c")
    assert 300 * 70 + 6 * 64 * 32 < sent < 2 * most

    # One that was restarted gets everything; this costs the others nothing.
    sent, _ = send(state, "b, restarted")
    assert sent >= most
    assert send(state, "a", "b, restarted", "c") == (0, 3 * most)
    assert send(stepped(state, 4, 1e-4), "a", "b, restarted", "c")[0] < most
    sender._sent.forget()
    assert send(state, "a", "b, restarted", "c")[0] >= 3 * most
    sent, saved = send({name: value * 2 for name, value in state.items()}, "a", "b, restarted", "c")
    assert sent >= 3 * most - 3 * 8 * 40


@pytest.mark.parametrize("when", ["before it is asked", "in the middle"])
def test_an_engine_that_dies_on_a_shared_device_stops_nobody(ray_session, small_buckets, when) -> None:
    (engine,) = engines(0)
    if when == "in the middle":
        ray.get(engine.die_at.remote(3))
    else:
        ray.get(engine.die_at.remote(0))
        ray.kill(engine)
    target = UpdateTarget(engine, "0-gone", "node", (0,), 1)
    sender, state = ShardSender(torch.bfloat16, 6000), weights(0)
    with no_segment_left():
        assert sender.unsupported_reason(shards(state), [target]) is None
        sender.send(shards(state), [target])


def test_weights_that_change_on_the_way_are_named(ray_session, small_buckets, monkeypatch) -> None:
    """The digest is that of the shard, so that it shows what happens to the bytes afterwards."""
    (engine,) = engines(0)
    target = UpdateTarget(engine, "0-changed", "node", (0,), 1)
    sender, state = ShardSender(torch.bfloat16, 6000, check=True), weights(0)
    assert sender.unsupported_reason(shards(state), [target]) is None
    announce = ShardMemoryTransport._announce

    def flipping(transport, slot, content):  # type: ignore[no-untyped-def]
        for message in content.round.messages:
            for piece in message.pieces:
                if piece.name == "layers.7.w":
                    piece.view(transport._buffer(slot))[3, 3] += 1
        return announce(transport, slot, content)

    monkeypatch.setattr(ShardMemoryTransport, "_announce", flipping)
    sender.send(shards(state), [target])
    _, _, faults = ray.get(engine.end.remote())
    assert len(faults) == 1 and "(1): layers.7.w" in faults[0]


def test_an_engine_that_takes_whole_tensors_is_the_reason_to_stream(ray_session) -> None:
    (engine,) = engines(0, takes_shards=False)
    target = UpdateTarget(engine, "0-whole", "node", (0,), 1)
    assert "whole tensors" in str(ShardSender(None, 2**20).unsupported_reason(shards(weights(0)), [target]))
    (engine,) = engines(0)
    target = UpdateTarget(engine, "0-more", "node", (0, 1), 2)
    assert "1 of the engine's 2" in str(ShardSender(None, 2**20).unsupported_reason(shards(weights(0)), [target]))
