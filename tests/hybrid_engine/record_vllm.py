"""A program: two processes per layout record what vLLM's own loaders copy, and compare with a real load.

    python record_vllm.py tp=2@FOLDER tp=2,ep=2@FOLDER pp=2@FOLDER...

Each process writes LAYOUT-RANK.json to the folder of each model. The processes are forked once vLLM and the models'
modules are imported, because imports take almost all of the time.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
from recorded_load import PROCESSES, compare, run, write

from hybridrl.layouts.topology import GenerationLayout, parse_layout
from hybridrl.models.model_config import load_model_config


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


def main(rank: int, arguments: list[str], port: int) -> None:
    """One process of the two."""
    os.environ.update(METHOD=f"tcp://127.0.0.1:{port}", VLLM_DIST_IDENT=str(port))
    for which in arguments:
        sizes, _, folder = which.partition("@")
        layout = parse_layout(sizes, GenerationLayout)
        with built(folder, layout, rank) as model:
            write(which, rank, compare(model, model.load_weights, folder, layout, rank))


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
    for _, of_layout in groupby(sys.argv[1:], key=lambda which: which.partition("@")[0]):
        run(list(of_layout), main)
