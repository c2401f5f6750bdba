"""New weights for an SGLang engine, sent by another process or by a plan: what its tests hand over."""

import multiprocessing
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hybridrl.hybrid_engine.buckets import Bucket, BucketEntry, Checkpoint, ShardBucket
from hybridrl.hybrid_engine.plan import plan_slices
from hybridrl.hybrid_engine.schedule import schedule
from hybridrl.layouts.slices import TensorSlices, whole


def perturbed(folder: Path, seed: int):
    """The model of `folder` with matrices four times as large, and noise from `seed`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4).add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def _send(folder: Path, seed: int, buckets: int, channel) -> None:
    """In a process of its own: the parameters of `perturbed` in shared memory, some at a time."""
    parameters = list(perturbed(folder, seed).named_parameters())
    size = sum(value.numel() * 4 for _, value in parameters)
    segment = shared_memory.SharedMemory(create=True, size=size)
    for part in range(buckets):
        entries, offset = [], 0
        for name, value in parameters[part::buckets]:
            data = value.detach().numpy().tobytes()
            segment.buf[offset : offset + len(data)] = data
            entries.append(BucketEntry(name, "float32", tuple(value.shape), offset, len(data)))
            offset += len(data)
        channel.send(Bucket("shared_memory", segment.name, tuple(entries)))
        assert channel.recv() == "taken"
        segment.buf[:size] = bytes(size)  # whoever still reads it reads zeros
    segment.close()
    segment.unlink()
    channel.send("gone")


def buckets_of(folder: Path, seed: int, load: Callable[[Bucket], object], buckets: int = 3) -> None:
    """Hand the buckets of a sending process to `load`, one after the other."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(folder, seed, buckets, theirs))
    process.start()
    while isinstance(message := ours.recv(), Bucket):
        load(message)
        ours.send("taken")
    process.join()
    assert process.exitcode == 0


def shards_of(folder: Path, seed: int, engine, run: Callable) -> None:  # type: ignore[type-arg]
    """Give an engine the parameters of `perturbed` by a plan: every process the parts that it asks for, in rounds."""
    state = {name: value.detach() for name, value in perturbed(folder, seed).named_parameters()}
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    dtypes = dict.fromkeys(shapes, torch.float32)
    needs = run(engine.required_slices(Checkpoint(shapes, dtypes)))
    assert len(needs) == 2 and not any(need.whole for need in needs)
    held: list[dict[str, TensorSlices]] = [{name: (whole(shape),) for name, shape in shapes.items()}, {}]
    needed = [dict(need.slices) for need in needs]
    made = plan_slices(shapes, held, needed)
    assert (
        0.45 < made.needed[1] / made.elements < 0.55
    )  # its half; its part of the padded vocabulary is the smaller one
    rounds = schedule(made, held, needed, dtypes, bucket_bytes=200_000)
    assert len(rounds) > 3
    size = max(now.bucket for now in rounds)
    segments = [shared_memory.SharedMemory(create=True, size=size) for _ in needs]
    for now in rounds:
        for message in now.messages:
            data = torch.frombuffer(segments[message.target].buf, dtype=torch.uint8)
            for piece in message.pieces:
                piece.view(data).copy_(state[piece.name][piece.slice.within(whole(shapes[piece.name]))])
            del data
        messages = tuple(tuple(now.received_by(number)) for number in range(2))
        names = tuple(segment.name for segment in segments)
        run(engine.load_bucket(ShardBucket("shared_memory", names, size, now.names, messages)))
        for segment in segments:
            segment.buf[:size] = bytes(size)  # whoever still reads it reads zeros
    run(engine.end_update())
    for segment in segments:
        segment.close()
        segment.unlink()
