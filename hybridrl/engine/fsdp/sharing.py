"""Whether an engine computes tokens once that rows share (`model.share_prefixes`), and switching attention for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hybridrl.errors import ModelError
from hybridrl.models import tree_attention
from hybridrl.models.vision import is_vision_model
from hybridrl.notify import notify
from hybridrl.utils import distributed


def check_sharing(model: Any, engine: Any) -> None:
    """Refuse settings that `model.share_prefixes=True` cannot be combined with.

    Args:
        model: a `ModelConfig`.
        engine: an `FSDPConfig`.

    Raises:
        ModelError: the message names both settings.
    """
    problem = _unsupported_reason(model, engine)
    if problem is not None:
        raise ModelError(
            f"model.share_prefixes=True cannot be combined with {problem}, or set model.share_prefixes=False"
        )


def sharing_of(model: Any, engine: Any, config: PreTrainedConfig) -> bool | None:
    """Return `MicroBatchedEngine.shares_prefixes` for these settings and this model.

    A notice gives the reason if `share_prefixes=True` is set and the model does not support it.

    Args:
        model: a `ModelConfig`.
        engine: an `FSDPConfig`.
        config: of the model of transformers.

    Raises:
        ModelError: see `check_sharing`.
    """
    setting: bool | None = model.share_prefixes
    if setting is False:
        return False
    if setting:
        check_sharing(model, engine)
    elif not may_share(model, engine, config):
        return False
    reason = tree_attention.sharing_unsupported_reason(config)
    if reason and setting and distributed.get_rank() == 0:
        notify(f"{model.path}: model.share_prefixes has no effect, because {reason}")
    return False if reason else setting


def may_share(model: Any, engine: Any, config: PreTrainedConfig) -> bool:
    """Whether an engine with these settings computes prefix trees where that saves enough, by what is known of them.

    Args:
        model, engine, config: see `sharing_of`.
    """
    possible = (
        model.share_prefixes is not False and _unsupported_reason(model, engine) is None and not is_vision_model(config)
    )
    return possible and tree_attention.sharing_unsupported_reason(config) is None


def _unsupported_reason(model: Any, engine: Any) -> str | None:
    """The setting that is in the way, and what to change; None if there is none."""
    implementation = model.override_config.get("attn_implementation")
    if implementation is not None:
        return (
            f"model.override_config.attn_implementation={implementation}: it has an attention of its own; "
            "leave that out"
        )
    if not model.use_remove_padding:
        return "model.use_remove_padding=False: it computes no padding; leave that at True"
    if engine.use_torch_compile:
        return "fsdp_config.use_torch_compile=True: its attention is not compiled; set that to False"
    return None


@contextlib.contextmanager
def with_attention(module: nn.Module, name: str) -> Iterator[None]:
    """Within the context, the layers of a model use this attention of transformers."""
    configs: dict[int, Any] = {}  # a backbone may have one of its own
    for part in module.modules():
        config = getattr(part, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs[id(config)] = config
    originals = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = name
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = originals[key]
