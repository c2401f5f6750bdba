"""Seconds and bytes of the transition from training shards to generation shards, for 2, 4 and 8 processes.

    python benchmarks/resharding.py                # about 0.3 GB in float32 on one machine's CPUs, over gloo
    python benchmarks/resharding.py --training fsdp2 --generation-tp 1 --processes 2 4

Every process holds its training shard (Megatron-core's cuts with tp = all processes, or FSDP2's rows) and the
parameters of its part of a vLLM engine with `--generation-tp`. Four ways lead from the one to the other:

    plan        the library's: in rounds, each process receives what it lacks (`hybridrl.hybrid_engine.exchange`)
    everything  every process gathers the whole model, then copies its part (DeepSpeed-Chat)
    streaming   every process gathers one whole parameter after another (`rollout.checkpoint_engine.method=streamed`)
    resident    no transfer: each process copies its part of whole tensors that it already has

Bytes are those that a process receives, counted below `torch.distributed`; memory is what it holds besides its two
shards at the peak. Both are exact and the same everywhere. Seconds depend on the machine, and with more processes than
cores they say how much work there is and not how a cluster would do; the best of `--rounds` is printed. The plan is
made once, as in a run.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen3Config

from hybridrl.hybrid_engine.exchange import Exchange, Shards, assemble
from hybridrl.hybrid_engine.plan import plan, plan_slices
from hybridrl.hybrid_engine.schedule import Round, schedule
from hybridrl.layouts.model_tensors import model_tensors
from hybridrl.layouts.slices import TensorSlice, TensorSlices, slices_of, whole
from hybridrl.layouts.topology import GenerationLayout, Layout, MegatronLayout, ShardedLayout
from hybridrl_testing.counters import ReceivedBytes

Parts = dict[str, list[tuple[TensorSlice, torch.Tensor]]]
CPU = torch.device("cpu")


@dataclass
class Setting:
    """What a process needs for each of the four ways."""

    rank: int
    shapes: dict[str, tuple[int, ...]]
    held: list[dict[str, TensorSlices]]
    needed: list[dict[str, TensorSlices]]
    shards: Parts
    target: Parts
    rounds: list[Round]
    extra: int = 0  # bytes besides the two shards, at the peak

    def place(self, name: str, value: torch.Tensor) -> None:
        """Copy this process's part of a whole tensor."""
        for tensor_slice, memory in self.target.get(name, ()):
            memory.copy_(value[tensor_slice.within(whole(self.shapes[name]))])

    def gather(self, name: str) -> torch.Tensor:
        """The whole tensor: every process that holds a part of it sends that to all."""
        value = torch.empty(self.shapes[name])
        seen: set[TensorSlice] = set()
        for rank, held in enumerate(self.held):
            for tensor_slice in held.get(name, ()):
                if tensor_slice in seen:
                    continue  # a copy of what another process sent
                seen.add(tensor_slice)
                index = tensor_slice.within(whole(self.shapes[name]))
                part = torch.empty(tensor_slice.extents)
                if rank == self.rank:
                    part.copy_(next(tensor for at, tensor in self.shards[name] if at == tensor_slice))
                dist.broadcast(part, rank)
                value[index] = part
        return value


def by_plan(setting: Setting) -> None:
    """The library's rounds."""
    exchange = Exchange(setting.rank, CPU)
    shards = Shards(
        (name, tensor_slice, tensor) for name, parts in setting.shards.items() for tensor_slice, tensor in parts
    )
    bucket = torch.empty(max(now.bucket for now in setting.rounds), dtype=torch.uint8)
    for now in setting.rounds:
        exchange.run(now, shards, bucket)
        arrived: Parts = {}
        for message in now.received_by(setting.rank):
            for piece in message.pieces:
                arrived.setdefault(piece.name, []).append((piece.slice, piece.view(bucket)))
        for name, parts in arrived.items():
            for tensor_slice, memory in setting.target[name]:
                assemble(memory, tensor_slice, parts, name)
        sent = sum(message.size for message in now.sent_by(setting.rank))
        setting.extra = max(setting.extra, bucket.nbytes + sent)


def by_gathering_everything(setting: Setting) -> None:
    """All of the model on every process."""
    model = {name: setting.gather(name) for name in setting.shapes}
    setting.extra = sum(value.nbytes for value in model.values())
    for name, value in model.items():
        setting.place(name, value)


def by_streaming(setting: Setting) -> None:
    """One whole parameter at a time."""
    for name in setting.shapes:
        value = setting.gather(name)
        setting.extra = max(setting.extra, 2 * value.nbytes)  # and the part that is being received
        setting.place(name, value)


def model_config(layers: int) -> Qwen3Config:
    """Return the configuration of a model of some layers, whose weights are resharded."""
    return Qwen3Config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=False,
    )


def run(rank: int, port: int, arguments: argparse.Namespace, processes: int) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes)
    specs, layers = model_tensors(model_config(arguments.layers))
    megatron = arguments.training == "megatron"
    training: Layout = MegatronLayout(tp=processes) if megatron else ShardedLayout(processes)
    tp = min(arguments.generation_tp, processes)
    generation = GenerationLayout(tp=tp, replicas=processes // tp)
    slots = plan(specs, training, generation, layers).slots

    def slices(layout: Layout, index: int) -> dict[str, TensorSlices]:
        at = layout.coordinates(index)
        return {spec.name: found for spec in specs if (found := slices_of(spec, layout, at, layers))}

    shapes = {spec.name: spec.shape for spec in specs}
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    held = [slices(training, device) for device in range(processes)]
    needed = [slices(generation, slot) for slot in slots]

    def part(name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        return state[name][tensor_slice.within(whole(shapes[name]))].clone()

    shards = {
        name: [(tensor_slice, part(name, tensor_slice)) for tensor_slice in found] for name, found in held[rank].items()
    }
    target = {
        name: [(tensor_slice, torch.empty(tensor_slice.extents)) for tensor_slice in found]
        for name, found in needed[rank].items()
    }
    size = sum(value.nbytes for value in state.values())
    started = time.perf_counter()
    rounds = schedule(
        plan_slices(shapes, held, needed), held, needed, dict.fromkeys(shapes, torch.float32), size // 8, [rank]
    )
    planned = time.perf_counter() - started
    setting = Setting(rank, shapes, held, needed, shards, target, rounds)
    if rank == 0:
        print(f"\n{processes} processes, {arguments.training} -> tp {tp}, {size / 1e9:.2f} GB of weights", flush=True)
        print(f"the plan: {planned:.3f} s, {len(rounds)} rounds", flush=True)
        print(f"{'':12}{'seconds':>10}{'received GB':>14}{'extra GB':>12}", flush=True)
    ways: dict[str, Callable[[Setting], None]] = {
        "plan": by_plan,
        "everything": by_gathering_everything,
        "streaming": by_streaming,
        "resident": lambda one: [one.place(name, value) for name, value in state.items()] and None,
    }
    for title, way in ways.items():
        best = float("inf")
        for _ in range(arguments.rounds):
            for memories in target.values():
                for _, memory in memories:
                    memory.fill_(torch.nan)
            setting.extra = 0
            dist.barrier()
            started = time.perf_counter()
            way(setting)
            dist.barrier()
            best = min(best, time.perf_counter() - started)
        with ReceivedBytes() as counter:
            way(setting)
        for name, memories in target.items():
            for tensor_slice, memory in memories:
                assert torch.equal(memory, state[name][tensor_slice.within(whole(shapes[name]))]), (title, name)
        most = torch.tensor([counter.total, setting.extra])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if rank == 0:
            received, extra = (int(value) / 1e9 for value in most)
            print(f"{title:12}{best:10.3f}{received:14.4f}{extra:12.4f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--training", choices=("megatron", "fsdp2"), default="megatron")
    parser.add_argument("--generation-tp", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for processes in arguments.processes:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(run, (port, arguments, processes), processes)


if __name__ == "__main__":
    main()
