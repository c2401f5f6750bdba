"""Unmodified Megatron-core on a CPU with gloo, for small machines and for the forecast of memory, which uses no GPU.

Megatron-core calls `torch.cuda` in many places and has no other back end. Where there is no GPU, an import hook
compiles its modules from a syntax tree in which those places name a stand-in. Nothing of `torch.cuda` itself is
changed, no file is written, and on a machine with a GPU this module is not imported.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hybridrl.utils import device
from hybridrl.utils.python_source import parsed

_PACKAGE = "megatron"
#: where rewritten code finds the stand-in
_ATTRIBUTE = "_hybridrl_cpu_for_megatron"
_TENSOR_TYPES = "torch.cuda."


def install() -> None:
    """Install the hook, once per process.

    Raises:
        RuntimeError: there is a GPU, or megatron-core was imported before.
    """
    if hasattr(torch, _ATTRIBUTE):
        return
    if device.is_gpu():
        raise RuntimeError("the CPU back end of Megatron-core was requested on a machine with a GPU")
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before the CPU back end was installed")
    setattr(torch, _ATTRIBUTE, _stand_in())
    sys.meta_path.insert(0, _Finder())


class _Stream:
    """A stream or an event: work on a CPU is done when its call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> _Stream:
        return self

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _Namespace(types.ModuleType):
    """Namespace that rewritten modules use in place of `torch.cuda`; names that it lacks are those of `torch.cuda`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


@contextlib.contextmanager
def _no_context(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _nothing(*_: Any, **__: Any) -> None: ...


def _stand_in() -> types.ModuleType:
    space: Any = _Namespace(_ATTRIBUTE)
    stream = _Stream()
    space.current_device = device.current_device
    space.device_count = lambda: 1
    space.is_available = lambda: False
    space.set_device = space.synchronize = space.empty_cache = space.set_stream = _nothing
    space.Stream = space.Event = _Stream
    space.current_stream = space.default_stream = lambda *_, **__: stream
    space.stream = _no_context
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "DoubleTensor", "IntTensor", "LongTensor"):
        setattr(space, name, getattr(torch, name))
    space.manual_seed = space.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))
    space.get_rng_state = lambda *_, **__: torch.get_rng_state()
    space.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    space.random = types.SimpleNamespace(get_rng_state=space.get_rng_state, set_rng_state=space.set_rng_state)
    space.nvtx = types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=_no_context, mark=_nothing)
    space.memory_allocated = space.memory_reserved = space.max_memory_allocated = lambda *_: 0
    space.memory_stats = lambda *_: {}
    return space


class _Rewrite(ast.NodeTransformer):
    """Names of CUDA become those of the CPU: devices, `torch.cuda`, `.cuda()`, pinned memory, `device_ids`."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if node.value == "cuda":
            return ast.copy_location(ast.Constant("cpu"), node)
        if isinstance(node.value, str) and node.value.startswith(_TENSOR_TYPES) and node.value.endswith("Tensor"):
            return ast.copy_location(ast.Constant(node.value.replace(_TENSOR_TYPES, "torch.")), node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        return node  # the literal parts of an f-string are text for people

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            node.attr = _ATTRIBUTE
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            node.func.attr, node.args, node.keywords = "cpu", [], []
        # gloo's barrier refuses device_ids, and memory cannot be pinned without a driver
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "device_ids"]
        for keyword in node.keywords:
            if keyword.arg == "pin_memory":
                keyword.value = ast.copy_location(ast.Constant(False), keyword.value)
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)  # never the cached bytecode of the unmodified source

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> types.CodeType:  # type: ignore[override]
        tree = ast.fix_missing_locations(_Rewrite().visit(parsed(data, path)))
        code: types.CodeType = compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ in _AFTER_IMPORT:
            _AFTER_IMPORT[module.__name__](module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != _PACKAGE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _random_states(module: Any) -> None:
    """The originals queue calls until CUDA is initialised."""
    module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _moe_utils(module: Any) -> None:
    module.__dict__.setdefault("te_general_gemm", None)  # read also where Transformer Engine cannot be imported

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if isinstance(tensor, torch.Tensor) and as_numpy else tensor

    module.maybe_move_tensor_to_cpu = to_host  # the original tests `tensor.is_cuda` and returns the wrong type here


def _uneven_parts(module: Any) -> None:
    """gloo gathers and scatters parts of one size only; the parts of an expert get different numbers of tokens."""
    gather, scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gathered(part: torch.Tensor, group: Any, sizes: Sequence[int] | None = None, *rest: Any) -> torch.Tensor:
        if sizes is None or max(sizes) == min(sizes):
            return gather(part, group, sizes, *rest)
        longest = max(sizes)
        padded = part.new_zeros(longest, *part.shape[1:])
        padded[: len(part)] = part
        parts = gather(padded, group).split(longest)
        return torch.cat([padded_part[:size] for padded_part, size in zip(parts, sizes, strict=True)])

    def scattered(whole: torch.Tensor, group: Any, sizes: Sequence[int] | None = None, *rest: Any) -> torch.Tensor:
        if sizes is None or max(sizes) == min(sizes):
            return scatter(whole, group, sizes, *rest)
        summed = whole.clone()
        torch.distributed.all_reduce(summed, group=group)
        return summed.split(list(sizes))[group.rank()].clone()

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gathered, scattered


_AFTER_IMPORT: dict[str, Callable[[Any], None]] = {
    "megatron.core.tensor_parallel.random": _random_states,
    "megatron.core.tensor_parallel.mappings": _uneven_parts,
    "megatron.core.jit": lambda module: module.disable_jit_fuser(),  # it would compile C++ in the first call
    "megatron.core.transformer.moe.moe_utils": _moe_utils,
}
