"""The environment variables that choose Transformer Engine's attention kernels, one set of values per engine.

Megatron-core writes `attention_backend` into the environment of the process while it builds a model, and refuses a
second model with another value.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_VARIABLES = "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"
# Where versions of Transformer Engine keep the backend of their last call, which they reuse for calls of its kind.
_CACHES = (
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention",
    "transformer_engine.pytorch.attention",
)


class AttentionVariables:
    """An engine's values of the variables. They start as those of the process."""

    def __init__(self) -> None:
        self._values = _read()

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Within the context, the environment has this engine's values; changes to them are kept for the engine."""
        before = _read()
        _write(self._values)
        try:
            yield
        finally:
            self._values = _read()
            _write(before)


def _read() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in _VARIABLES}


def _write(values: dict[str, str | None]) -> None:
    if values == _read():
        return
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for module in _CACHES:
        cache = getattr(sys.modules.get(module), "_attention_backends", None)
        if cache is not None:
            cache["backend_selection_requires_update"] = True
