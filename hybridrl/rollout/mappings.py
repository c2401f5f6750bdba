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


@reads_mapping("sglang-arguments")
def check_sglang(entries: Entries) -> Iterator[str]:
    """Check `engine_kwargs.sglang` against the fields of `ServerArgs`."""
    names = _fields("sglang", ("srt/server_args.py", "srt/arg_groups/fields/*.py"), ())
    if names:
        yield from entries.unknown(names, "SGLang's ServerArgs")


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
