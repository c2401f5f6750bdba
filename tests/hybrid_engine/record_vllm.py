"""A program: two processes per layout record what vLLM's own loaders copy, and compare with a real load.

    python record_vllm.py tp=2@FOLDER tp=2,ep=2@FOLDER pp=2@FOLDER...

Each process writes LAYOUT-RANK.json to the folder of each model. The processes are forked once vLLM and the models'
modules are imported, because imports take almost all of the time.
"""

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from hybridrl.hybrid_engine.model_tensors import model_tensors
from hybridrl.hybrid_engine.record import LoadRecorder
from hybridrl.hybrid_engine.shards import boxes_of, count
from hybridrl.hybrid_engine.topology import GenerationLayout, parse_layout
from hybridrl.models.loading import load_model_config

PROCESSES = 2


def by_rules(folder: str, layout: GenerationLayout, rank: int) -> dict[str, list[object]]:
    """The boxes that the rules of `model_tensors` give this rank."""
    specs, layers = model_tensors(load_model_config(folder))
    found = {spec.name: boxes_of(spec, layout, layout.coordinates(rank), layers) for spec in specs}
    return {name: sorted((box.start, box.stop) for box in boxes) for name, boxes in found.items()}


@contextmanager
def built(folder: str, layout: GenerationLayout, rank: int) -> Iterator[torch.nn.Module]:
    """A model, in the context in which its loaders work."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(
        model=folder,
        tensor_parallel_size=layout.tp,
        pipeline_parallel_size=layout.pp,
        enable_expert_parallel=layout.ep > 1,
        enforce_eager=True,
        dtype="float32",
        skip_tokenizer_init=True,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(PROCESSES, rank, os.environ["METHOD"], rank, "gloo")
        initialize_model_parallel(layout.tp, layout.pp)
        yield initialize_model(vllm_config=config)
        destroy_model_parallel()


def check(which: str, rank: int) -> dict[str, object]:
    """Record one load, carry its copies out by hand, and compare with the load itself."""
    sizes, _, folder = which.partition("@")
    layout = parse_layout(sizes, GenerationLayout)
    with built(folder, layout, rank) as model, torch.no_grad():
        state = load_file(Path(folder) / "model.safetensors")
        parameters = dict(model.named_parameters()) | dict(model.named_buffers())
        for parameter in model.parameters():
            parameter.data.zero_()
        recorder = LoadRecorder(parameters, {name: tuple(t.shape) for name, t in state.items()}, torch.float32)
        with recorder:
            model.load_weights(recorder.sources())
        untouched = all(not parameter.any() for parameter in model.parameters())
        for copy in recorder.copies:
            part = state[copy.source][tuple(map(slice, copy.box.start, copy.box.stop))]
            whole = parameters[copy.parameter].data
            there = whole[tuple(map(slice, copy.parameter_box.start, copy.parameter_box.stop))]
            there.copy_(part.reshape(there.shape))
        by_hand = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_weights(iter(state.items()))
    rules, required = by_rules(folder, layout, rank), recorder.required()
    differ = [
        name
        for name, boxes in required.items()
        if name in rules and sorted((box.start, box.stop) for box in boxes) != rules[name]
    ]
    experts = {name for name in state if ".experts." in name}
    fused = sum(count(boxes) for spec, boxes in _fused(folder, layout, rank))
    return {
        "copies": len(recorder.copies),
        "unplanned": recorder.unplanned,
        "skipped": [
            name for name in recorder.skipped if rules.get(name) or (name not in rules and name not in experts)
        ],
        "untouched": untouched,
        "wrong": [name for name, parameter in parameters.items() if not torch.equal(parameter, by_hand[name])],
        "differ_from_rules": differ,
        "without_rule": sorted(name for name in required if name not in rules and name not in experts),
        "experts_recorded": sum(count(required.get(name, ())) for name in experts),
        "experts_by_rules": fused,
    }


def _fused(folder: str, layout: GenerationLayout, rank: int) -> list[tuple[str, tuple[object, ...]]]:
    specs, layers = model_tensors(load_model_config(folder))
    return [
        (spec.name, boxes_of(spec, layout, layout.coordinates(rank), layers))
        for spec in specs
        if spec.cut.expert_dim is not None
    ]


def main(rank: int, arguments: list[str]) -> None:
    """One process of the two."""
    for which in arguments:
        layout, _, folder = which.partition("@")
        report = check(which, rank)
        Path(folder, f"{layout}-{rank}.json").write_text(json.dumps(report))


def import_models(arguments: list[str]) -> None:
    """Import vLLM's classes of the models; vLLM itself would start a process per class to look at it."""
    from vllm import ModelRegistry

    for folder in dict.fromkeys(which.partition("@")[2] for which in arguments):
        for name in load_model_config(folder).architectures:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


if __name__ == "__main__":
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        OMP_NUM_THREADS="1",
    )
    import_models(sys.argv[1:])
    for _, together in groupby(sys.argv[1:], key=lambda which: which.partition("@")[0]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(METHOD=f"tcp://127.0.0.1:{port}", VLLM_DIST_IDENT=str(port))
        mp.start_processes(main, (list(together),), PROCESSES, start_method="fork")
