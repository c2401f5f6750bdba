"""A program: eight gloo processes carry out plans, and check every byte that arrives and how many there were.

    python exchange_ranks.py SEED FOLDER

Each process writes RANK.json to the folder: what was checked, and for the layouts of the paper's Table 2 the bytes
received and the memory that the transfer took.
"""

import itertools
import json
import os
import random
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.hybrid_engine.exchange import Exchange, Shards, assemble
from hybridrl.hybrid_engine.plan import plan, plan_slices
from hybridrl.hybrid_engine.schedule import Round, schedule
from hybridrl.layouts.slices import Cut, TensorSlice, TensorSlices, TensorSpec, slices_of
from hybridrl.layouts.topology import GenerationLayout, MegatronLayout
from hybridrl_testing.counters import AllocationCounter, ReceivedBytes

WORLD = 8
LAYERS = 8
TRIALS = 40
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)
CPU = torch.device("cpu")


def split(tensor_slice: TensorSlice, chance: random.Random, times: int) -> list[TensorSlice]:
    """Disjoint slices that make up the slice, by random cuts."""
    slices = [tensor_slice]
    for _ in range(times):
        one = slices.pop(chance.randrange(len(slices)))
        dim = chance.randrange(len(one.start))
        middle = chance.randint(one.start[dim], one.stop[dim])
        cut = (
            TensorSlice(one.start, (*one.stop[:dim], middle, *one.stop[dim + 1 :])),
            TensorSlice((*one.start[:dim], middle, *one.start[dim + 1 :]), one.stop),
        )
        slices += [part for part in cut if part.elements]
    return slices


def random_layout(
    chance: random.Random, ranks: int
) -> tuple[dict[str, torch.Tensor], list[dict[str, TensorSlices]], list[dict[str, TensorSlices]]]:
    """Tensors, and the slices of each that every rank holds (all of it somewhere) and needs."""
    state, held, needed = {}, [{} for _ in range(ranks)], [{} for _ in range(ranks)]
    for number in range(chance.randint(1, 6)):
        name, shape = f"t{number}", tuple(chance.randint(1, 9) for _ in range(chance.randint(1, 3)))
        generator = torch.Generator().manual_seed(chance.randrange(2**31))
        state[name] = torch.randint(0, 100, shape, generator=generator).to(chance.choice(DTYPES))
        whole = TensorSlice((0,) * len(shape), shape)
        owned: list[list[TensorSlice]] = [[] for _ in range(ranks)]
        for tensor_slice in split(whole, chance, chance.randint(0, 6)):
            for rank in chance.sample(range(ranks), chance.randint(1, min(3, ranks))):
                owned[rank].append(tensor_slice)
        for rank in range(ranks):
            if owned[rank]:
                held[rank][name] = tuple(owned[rank])
            parts = split(whole, chance, 4) + split(whole, chance, 3)  # slices that a process needs may overlap
            if wanted := chance.sample(parts, min(len(parts), chance.randint(0, 3))):
                needed[rank][name] = tuple(dict.fromkeys(wanted))
    return state, held, needed


def run(
    rank: int,
    group: dist.ProcessGroup,
    state: dict[str, torch.Tensor],
    held: list[dict[str, TensorSlices]],
    needed: list[dict[str, TensorSlices]],
    bucket_bytes: int,
) -> tuple[int, int, int]:
    """Carry out a plan in two thirds of a bucket, and check what arrives.

    Returns:
        The bytes received, the rounds, and the most bytes that were alive beyond the training shard.
    """
    made = plan_slices({name: tuple(value.shape) for name, value in state.items()}, held, needed)
    dtypes = {name: value.dtype for name, value in state.items()}
    most = bucket_bytes * 2 // 3  # two slots and what is sent are three parts of two buckets
    rounds = schedule(made, held, needed, dtypes, most, devices=[rank])
    shards = Shards(
        # what is held has more precision than what travels, and lies anywhere in memory
        (
            name,
            tensor_slice,
            state[name].double()[tensor_slice.within(TensorSlice((0,) * len(tensor_slice.start), state[name].shape))],
        )
        for name, slices in held[rank].items()
        for tensor_slice in slices
    )
    exchange = Exchange(rank, CPU, group)
    with ReceivedBytes() as counter, AllocationCounter() as memory:  # the generation shard, and what the transfer takes
        generation = {
            name: [(tensor_slice, torch.empty(tensor_slice.extents, dtype=dtypes[name])) for tensor_slice in slices]
            for name, slices in needed[rank].items()
        }
        transfer(rank, exchange, rounds, shards, generation, most)
    for name, parts in generation.items():
        for tensor_slice, value in parts:
            assert torch.equal(value, state[name][tuple(map(slice, tensor_slice.start, tensor_slice.stop))]), name
    sizes = {name: value.dtype.itemsize for name, value in state.items()}
    planned = sum(int(one.received[rank]) * sizes[name] for name, one in made.tensors)
    sent = sum(int(one.sent[rank]) * sizes[name] for name, one in made.tensors)
    kept = sum(int(one.reused[rank]) * sizes[name] for name, one in made.tensors)
    assert counter.total == planned == exchange.traffic.received, (counter.by_operation, planned)
    assert (exchange.traffic.sent, exchange.traffic.reused) == (sent, kept)
    assert set(counter.by_operation) <= {"recv_"}, counter.by_operation
    return counter.total, len(rounds), memory.peak


def transfer(
    rank: int,
    exchange: Exchange,
    rounds: list[Round],
    shards: Shards,
    generation: dict[str, list[tuple[TensorSlice, torch.Tensor]]],
    most: int,
) -> None:
    """Fill the two slots in turn, as next to an engine, and copy what arrives into the generation shard."""
    slots = [torch.empty(max((now.bucket for now in rounds), default=0), dtype=torch.uint8) for _ in range(2)]
    for number, now in enumerate(rounds):
        bucket = slots[number % 2].fill_(0xAB)
        exchange.run(now, shards, bucket)
        arrived: dict[str, list[tuple[TensorSlice, torch.Tensor]]] = {}
        for message in now.received_by(rank):
            for piece in message.pieces:
                arrived.setdefault(piece.name, []).append((piece.slice, piece.view(bucket)))
        for name, parts in arrived.items():
            for tensor_slice, value in generation[name]:
                assemble(value, tensor_slice, parts, name)
        needs = sum(m.size for m in now.received_by(rank))
        assert needs <= most or len(now.names) == 1, "a round of several tensors is larger than its limit"
    exchange.close()


def even_model() -> list[TensorSpec]:
    """A model whose tensors all divide by 8 and are all cut: the paper's formulas hold for it exactly."""
    specs = []
    for layer in range(LAYERS):
        specs += [
            TensorSpec(f"layers.{layer}.q", (16, 8), Cut(dim=0, heads=8), layer),
            TensorSpec(f"layers.{layer}.o", (8, 16), Cut(dim=1), layer),
            TensorSpec(f"layers.{layer}.gate_up", (32, 8), Cut(dim=0, sections=(16, 16)), layer),
        ]
    return specs


def table_2(rank: int, groups: dict[int, dist.ProcessGroup]) -> list[dict[str, int]]:
    """Every nested pair of power-of-two layouts on up to 8 processes."""
    specs, found = even_model(), []
    state = {spec.name: torch.randn(spec.shape, generator=torch.Generator().manual_seed(1)) for spec in specs}
    size = sum(value.nbytes for value in state.values())
    powers = (1, 2, 4, 8)
    for t, p, t_g, p_g, dp in itertools.product(powers, powers, powers, powers, (1, 2)):
        if t % t_g or p % p_g or not 1 < t * p * dp <= WORLD:
            continue
        ranks = t * p * dp
        if rank >= ranks:
            continue
        training, generation = (
            MegatronLayout(tp=t, pp=p, dp=dp),
            GenerationLayout(t_g, p_g, replicas=ranks // t_g // p_g),
        )
        slots = plan(specs, training, generation, LAYERS).slots

        def slices(layout, index) -> dict[str, TensorSlices]:  # type: ignore[no-untyped-def]
            at = layout.coordinates(index)
            return {spec.name: found for spec in specs if (found := slices_of(spec, layout, at, LAYERS))}

        held = [slices(training, device) for device in range(ranks)]
        needed = [slices(generation, slots[device]) for device in range(ranks)]
        bucket = size // 4
        received, rounds, peak = run(rank, groups[ranks], state, held, needed, bucket)
        layouts = {"t": t, "p": p, "t_g": t_g, "p_g": p_g, "dp": dp}
        counts = {"received": received, "rounds": rounds, "peak": peak}
        found.append({**layouts, **counts, "model": size, "bucket": bucket})
    return found


def main(rank: int, port: int, seed: int, folder: Path) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    groups = {size: dist.new_group(list(range(size))) for size in range(2, WORLD + 1)}
    chance, checked, rounds = random.Random(seed), 0, 0
    for _ in range(TRIALS):
        ranks = chance.randint(2, WORLD)
        bucket = chance.choice((64, 700, 10_000))
        made = random_layout(chance, ranks)
        if rank < ranks:
            rounds += run(rank, groups[ranks], *made, bucket)[1]
            checked += 1
    found = table_2(rank, groups)
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps({"trials": checked, "rounds": rounds, "table_2": found}))


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free_port = free.getsockname()[1]
    children = []
    for number in range(WORLD):
        child = os.fork()  # before torch has threads; importing it eight times would take most of the test's time
        if child == 0:
            status = 1
            try:
                main(number, free_port, int(sys.argv[1]), Path(sys.argv[2]))
                status = 0
            except Exception:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
    statuses = [os.wait()[1] for _ in children]  # of all, so that none outlives this process
    sys.exit(int(any(statuses)))
