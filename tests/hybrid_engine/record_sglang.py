"""A program: two processes per model record what SGLang's own loaders copy, and compare with a real load.

    python record_sglang.py tp=2@FOLDER tp=2,ep=2@FOLDER pp=2@FOLDER...

Each process writes LAYOUT-RANK.json to the folder of each model, and padded-LAYOUT-RANK.json of the same model as
SGLang has it on a CPU, where it adds heads and columns that its kernels need. The processes are forked once SGLang and
its models' modules are imported. A model is built as in an engine's process, without a scheduler and a KV cache.
"""

import importlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch
from recorded_load import PROCESSES, compare, run, write
from safetensors.torch import load_file

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.hybrid_engine.buckets import Bucket, BucketEntry, Checkpoint, RequiredSlices, ShardBucket
from hybridrl.hybrid_engine.plan import plan_slices
from hybridrl.hybrid_engine.schedule import schedule
from hybridrl.layouts.slices import whole
from hybridrl.layouts.topology import GenerationLayout, parse_layout
from hybridrl.rollout.inference_engine import EngineSpec
from hybridrl.rollout.sglang import compat, weights

BUCKET = 30_000  # bytes: several rounds per model

State = dict[str, torch.Tensor]
Way = Callable[[torch.nn.Module, State, int], None]


def spec_of(folder: str, layout: GenerationLayout) -> EngineSpec:
    """What a replica gives its engine."""
    config = RolloutConfig(
        prompt_length=8,
        response_length=8,
        max_model_len=16,
        max_num_seqs=2,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_parallel_size=layout.ep,
        load_format="dummy",
    )
    return EngineSpec(config, ModelConfig(path=folder), (2,), pad_token_id=0)


def built(folder: str, layout: GenerationLayout, rank: int, port: int, padded: bool) -> torch.nn.Module:
    """A model of SGLang with random weights, in the layout's groups."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig as EngineModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(**compat.arguments(spec_of(folder, layout)))
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
    how, config = LoadConfig(load_format="dummy", tp_rank=rank), EngineModelConfig.from_server_args(arguments)
    bootstrap.init_layer_runtime(model_config=config)
    if padded:
        config = adjust_config_with_unaligned_cpu_tp(config, how, layout.tp)
    return get_model_loader(how).load_model(model_config=config, device_config=DeviceConfig("cpu", rank))


def tensors_of(model: torch.nn.Module) -> State:
    """All tensors of a model, also those that a loader computes from parameters and keeps next to them."""
    computed = {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
    return dict(model.named_parameters()) | dict(model.named_buffers()) | computed


def update(model: torch.nn.Module, state: State, rank: int) -> None:
    """Bring a model the weights by a plan, through the loader that SGLang calls: the parts that it asks for."""
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    dtypes = {name: value.dtype for name, value in state.items()}
    with tempfile.TemporaryDirectory() as folder:
        weights.load(model, weights.message(weights.Question(Checkpoint(shapes, dtypes), folder)))
        required: RequiredSlices = pickle.loads(Path(folder, str(rank)).read_bytes())
    held, needed = [{name: (whole(shape or (1,)),) for name, shape in shapes.items()}], [dict(required.slices)]
    rounds = schedule(plan_slices(shapes, held, needed), held, needed, dtypes, BUCKET)
    segment = SharedMemory(create=True, size=max(now.bucket for now in rounds))
    for now in rounds:
        received = tuple(now.received_by(0))
        data = torch.frombuffer(segment.buf, dtype=torch.uint8)
        for piece in (piece for message in received for piece in message.pieces):
            piece.view(data).copy_(state[piece.name][piece.slice.within(whole(shapes[piece.name]))])
        del data
        bucket = ShardBucket(
            "shared_memory", (segment.name,) * PROCESSES, now.bucket, now.names, (received,) * PROCESSES
        )
        weights.load(model, weights.message(bucket))
        segment.buf[:] = bytes(segment.size)  # whoever still reads it reads zeros
    weights.load(model, weights.message(None))
    segment.close()
    segment.unlink()


def stream(model: torch.nn.Module, state: State, rank: int) -> None:
    """Bring a model all weights in one bucket of shared memory, the same for both processes."""
    entries, size = [], 0
    for name, value in state.items():
        entries.append(BucketEntry(name, "float32", tuple(value.shape), size, value.nbytes))
        size += value.nbytes
    where: list[str | None] = [None]
    if rank == 0:
        segment = SharedMemory(create=True, size=size)
        segment.buf[:size] = b"".join(value.numpy().tobytes() for value in state.values())
        where = [segment.name]
    torch.distributed.broadcast_object_list(where)
    for turn in range(PROCESSES):  # one after the other, so that a change of the bucket would be seen
        if rank == turn:
            weights.load(model, weights.message(Bucket("shared_memory", where[0], tuple(entries))))
            weights.load(model, weights.message(None))
        torch.distributed.barrier()
    if rank == 0:
        segment.close()
        segment.unlink()


def wrong_after(way: Way, model: torch.nn.Module, state: State, rank: int) -> list[str]:
    """The tensors of a model that a way to update leaves different from SGLang's load of the whole checkpoint."""
    fill(model, state)
    expected = {name: value.detach().clone() for name, value in tensors_of(model).items()}
    fill(model, {name: torch.zeros_like(value) for name, value in state.items()})
    way(model, state, rank)
    return [name for name, value in tensors_of(model).items() if not torch.equal(value, expected[name])]


def fill(model: torch.nn.Module, state: State) -> None:
    """Load a checkpoint; some loaders change what they get."""
    model.load_weights((name, value.clone()) for name, value in state.items())  # type: ignore[operator]


def main(rank: int, arguments: list[str], port: int) -> None:
    """One process of the two, for one model."""
    (which,) = arguments
    sizes, _, folder = which.removeprefix("padded-").partition("@")
    layout = parse_layout(sizes, GenerationLayout)
    model = built(folder, layout, rank, port, padded=which.startswith("padded-"))
    report = compare(model, lambda some: model.load_weights(weights.joined(some, {})), folder, layout, rank)
    state = load_file(Path(folder) / "model.safetensors")
    write(which, rank, report | {way.__name__: wrong_after(way, model, state, rank) for way in (update, stream)})


if __name__ == "__main__":
    os.environ.update(compat.environment(spec_of("", parse_layout(f"tp={PROCESSES}", GenerationLayout))))
    compat.use_stand_ins()
    importlib.import_module("sglang.srt.models.registry")  # imports the modules of all models
    for argument in sys.argv[1:]:  # SGLang builds one model per process
        run([argument], main)
        run([f"padded-{argument}"], main)
