"""Readers of the arguments of inference engines.

Their names are read from the source of the installed engine, because an import of it takes as long as the start of a
run. Where it is not installed, the process that starts the engine checks them.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from hybridrl.config.mappings import Entries, reads_mapping
from hybridrl.registry import INFERENCE_ENGINES, MAPPING_READERS
from hybridrl.utils.python_source import parsed


@reads_mapping("vllm-arguments")
def check_vllm(entries: Entries) -> Iterator[str]:
    """Check `engine_kwargs.vllm` against the fields of `AsyncEngineArgs`."""
    names = _fields("vllm", ("engine/arg_utils.py",), ("EngineArgs", "AsyncEngineArgs"))
    if names:
        yield from entries.unknown({*names, *_OLDER_NAMES}, "vLLM's AsyncEngineArgs")
    yield from _reserved(entries, _RESERVED_OF_VLLM)
    yield from entries.contradictions({name: f"..{setting}" for name, setting in _SETTINGS_OF_VLLM.items()})


@reads_mapping("sglang-arguments")
def check_sglang(entries: Entries) -> Iterator[str]:
    """Check `engine_kwargs.sglang` against the fields of `ServerArgs`."""
    names = _fields("sglang", ("srt/server_args.py", "srt/arg_groups/fields/*.py"), ())
    if names:
        yield from entries.unknown(names, "SGLang's ServerArgs")
    yield from _reserved(entries, _RESERVED_OF_SGLANG)
    yield from entries.contradictions({name: f"..{setting}" for name, setting in _SETTINGS_OF_SGLANG.items()})


#: arguments that hybridrl itself needs as it sets them, and why
_RESERVED_OF_VLLM = {
    "model": "it is model.path of the run",
    "worker_extension_cls": "weights arrive by hybridrl's own extension",
    "logprobs_mode": "log-probabilities are those of the distribution that was sampled from",
    "generation_config": "sampling settings are those of rollout",
}
_RESERVED_OF_SGLANG = {
    "model_path": "it is model.path of the run",
    "custom_weight_loader": "weights arrive by hybridrl's own loader",
    "skip_tokenizer_init": "prompts are token ids",
}
#: arguments of an engine -> the settings of `rollout` that they are
_SETTINGS = {
    "dtype": "dtype",
    "load_format": "load_format",
}
_SETTINGS_OF_VLLM = _SETTINGS | {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    **{
        name: name
        for name in (
            *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "data_parallel_size", "enforce_eager", "seed"),
            *("enable_prefix_caching", "enable_chunked_prefill", "gpu_memory_utilization", "scheduling_policy"),
        )
    },
}
_SETTINGS_OF_SGLANG = _SETTINGS | {
    "tp_size": "tensor_model_parallel_size",
    "pp_size": "pipeline_model_parallel_size",
    "ep_size": "expert_parallel_size",
    "max_running_requests": "max_num_seqs",
    "context_length": "max_model_len",
    "mem_fraction_static": "gpu_memory_utilization",
    "random_seed": "seed",
    "disable_cuda_graph": "enforce_eager",
    "enable_deterministic_inference": "full_determinism",
    "watchdog_timeout": "stuck_timeout_s",
}


def _reserved(entries: Entries, reasons: Mapping[str, str]) -> Iterator[str]:
    for name, reason in reasons.items():
        if name in entries.values:
            yield f"{entries.key}.{name}={entries.values[name]}: {reason}. Remove it"


#: names that `hybridrl.rollout.vllm.compat.current_names` translates
_OLDER_NAMES = ("disable_mm_preprocessor_cache",)


@reads_mapping("engine-arguments")
def check_served_engine(entries: Entries) -> Iterator[str]:
    """Check `engine_kwargs` of a model that an engine serves: the arguments of engines are below their names."""
    engine = entries.near(".name")
    for name, values in entries.values.items():
        key, reader = f"{entries.key}.{name}", f"{name}-arguments"
        if not MAPPING_READERS.is_builtin(reader) or not isinstance(values, Mapping):
            continue  # another check refuses it
        if engine != name and INFERENCE_ENGINES.is_builtin(engine):
            yield f"{key}={dict(values)} has no effect, because {engine} serves the model. Remove it"
        elif engine == name:
            yield from MAPPING_READERS.get(reader)(Entries(key, values, entries.lookup))


@functools.cache
def _fields(package: str, patterns: tuple[str, ...], classes: tuple[str, ...]) -> frozenset[str]:
    """The annotated fields of classes in the source of an installed package; none if it is not installed.

    Args:
        patterns: files, relative to the package.
        classes: names of the classes; empty: all.
    """
    spec = importlib.util.find_spec(package)
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    return frozenset(
        field.target.id
        for folder in folders
        for pattern in patterns
        for file in folder.glob(pattern)
        for node in parsed(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and (not classes or node.name in classes)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )
