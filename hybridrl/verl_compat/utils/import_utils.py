"""`verl.utils.import_utils`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from hybridrl.utils.user_code import load_module, load_object

__all__ = [
    "import_external_libs",
    "is_megatron_core_available",
    "is_sglang_available",
    "is_vllm_available",
    "load_extern_object",
    "load_extern_type",
    "load_module",
]


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def is_vllm_available() -> bool:
    """Return whether vLLM is installed."""
    return _is_installed("vllm")


def is_sglang_available() -> bool:
    """Return whether SGLang is installed."""
    return _is_installed("sglang")


def is_megatron_core_available() -> bool:
    """Return whether Megatron Core is installed; hybridrl does not use it yet."""
    return _is_installed("megatron")


def import_external_libs(external_libs: str | Sequence[str] | None = None) -> None:
    """Import one or several modules."""
    for name in [external_libs] if isinstance(external_libs, str) else external_libs or ():
        load_module(name, "external_libs")


def load_extern_object(module_path: str, object_name: str) -> Any:
    """Return an object from a file (`file://PATH` or a path) or a module (`pkg://NAME` or a name).

    Raises:
        UserError: there is no such file, module or object.
    """
    return load_object(module_path.removeprefix("file://"), object_name, "module_path", "object_name")


def load_extern_type(file_path: str | None, type_name: str | None) -> Any:
    """Return a class from a file, or None without a path."""
    return None if not file_path else load_extern_object(file_path, str(type_name))
