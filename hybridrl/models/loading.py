"""Reads Hugging Face configurations, and builds models with or without weights.

A model is built in one of two ways. A rank that holds the weights gets them from `load_...` (`from_pretrained`,
which also knows how a checkpoint's names map onto the module). A rank that will receive its shards from another rank
builds an empty model on the meta device, which takes no memory and almost no time.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hybridrl.errors import ModelError
from hybridrl.models.tokenizer import looks_local
from hybridrl.utils import device

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def resolve_dtype(name: str, key: str) -> torch.dtype:
    """Return the torch dtype of a configured name. `auto` is bfloat16 on a GPU and float32 on a CPU.

    Raises:
        ModelError: the name is unknown; the error names the configuration key.
    """
    if name == "auto":
        return torch.bfloat16 if device.is_gpu() else torch.float32
    if name not in DTYPES:
        raise ModelError(f"{key}={name!r} is no dtype; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def attention_implementation(override: Mapping[str, Any]) -> str:
    """Choose the attention implementation: the override's `attn_implementation`, else flash attention 2, else sdpa."""
    chosen = override.get("attn_implementation")
    if chosen is not None:
        return str(chosen)
    return "flash_attention_2" if device.supports_flash_attention() else "sdpa"


def load_model_config(
    path: str | Path, trust_remote_code: bool = False, override: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """Read a model's `config.json` and apply `override` to it. Nested mappings are merged.

    Dropout is switched off, because the old and new log-probabilities of a token must come from the same function.
    Otherwise the first importance ratio would not be 1.

    Raises:
        ModelError: there is no such directory or no readable configuration, or `override` has a field that the model
            does not have.
    """
    source = checked_source(path)
    try:
        config = AutoConfig.from_pretrained(source, **({"trust_remote_code": True} if trust_remote_code else {}))
    except Exception as error:  # transformers may raise anything for a broken file
        raise ModelError(
            f"the model configuration of {source} cannot be read: {type(error).__name__}: {error}"
        ) from error
    override = dict(override or {})
    config._attn_implementation = attention_implementation(override)
    override.pop("attn_implementation", None)
    _apply_override(config, override, "model.override_config")
    for target in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in target.to_dict().items():
            if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
                setattr(target, name, 0.0)
    return config


def checked_source(path: str | Path) -> str | Path:
    """Return a local directory as a path, and a hub name unchanged.

    Raises:
        ModelError: a local directory does not exist or has no `config.json`.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{folder} is no model directory: it has no config.json; set actor_rollout_ref.model.path to "
                "one that has"
            )
        return folder
    if looks_local(path):
        raise ModelError(
            f"model directory {folder} does not exist; set actor_rollout_ref.model.path (critic.model.path) to "
            "one that does"
        )
    return path


def check_weights(path: str | Path) -> None:
    """Raise `ModelError` for a local directory that has a configuration but no weights."""
    folder = Path(path).expanduser()
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        raise ModelError(
            f"model directory {folder} holds no weights (no {' and no '.join(WEIGHT_PATTERNS)}); "
            "copy the model's weight files there or name another directory"
        )


def build_language_model(
    config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build a causal language model without weights: parameters and buffers are on the meta device."""
    with torch.device("meta"), _default_dtype(dtype):
        options = {"trust_remote_code": True} if trust_remote_code else {}
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **options)


def load_language_model(
    path: str | Path, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a causal language model with its weights in `dtype`, in main memory.

    Raises:
        ModelError: there are no weights, or they do not fit the configuration (missing names or other shapes).
    """
    return load_pretrained(AutoModelForCausalLM, path, config, dtype, trust_remote_code)


def load_pretrained(
    auto_class: Any,
    path: str | Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    may_miss: str | None = None,
) -> Any:
    """Call `auto_class.from_pretrained`, and turn any failure into a `ModelError`."""
    source = checked_source(path)
    check_weights(source)
    options = {"trust_remote_code": True} if trust_remote_code else {}
    try:
        with _no_progress_bar():
            model, report = auto_class.from_pretrained(
                source, config=config, dtype=dtype, output_loading_info=True, **options
            )
    except Exception as error:  # transformers may raise anything for a broken file
        raise ModelError(f"the weights of {source} cannot be loaded: {type(error).__name__}: {error}") from error
    missing = sorted(name for name in report["missing_keys"] if may_miss is None or not name.startswith(may_miss))
    if missing:
        raise ModelError(
            f"the weights of {source} do not fill the model {type(model).__name__}: {len(missing)} missing, the first "
            f"{', '.join(missing[:3])}; config.json and the weight files belong to different models"
        )
    return model


def decoder_layer_classes(model: nn.Module, configured: Any = None) -> set[str]:
    """Return the class names of the blocks that are sharded separately: the configured ones, else the model's list."""
    if configured:
        return {configured} if isinstance(configured, str) else set(configured)
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return names


def to_checkpoint_names(
    model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole parameters under the names, and in the form, that the model's checkpoints use.

    For most architectures these are the module's own. Some modules keep weights in another form than their checkpoints
    (for example, all experts of a layer in one tensor). These are converted back one layer at a time.
    """
    if not _has_conversions(model):
        yield from tensors
        return
    from transformers.core_model_loading import revert_weight_conversion

    def layer(item: tuple[str, torch.Tensor]) -> str:
        found = re.match(r".*?\.\d+\.", item[0])
        return found.group() if found else item[0]

    for _, group in itertools.groupby(tensors, key=layer):
        yield from revert_weight_conversion(model, dict(group)).items()


def _has_conversions(model: nn.Module) -> bool:
    if not isinstance(model, PreTrainedModel):
        return False
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False))


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout module's probability to 0."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _apply_override(config: PreTrainedConfig, override: Mapping[str, Any], where: str) -> None:
    for name, value in override.items():
        if not hasattr(config, name):
            raise ModelError(f"{where}.{name}: a {type(config).__name__} has no such field")
        current = getattr(config, name)
        if isinstance(value, Mapping) and isinstance(current, PreTrainedConfig):
            _apply_override(current, value, f"{where}.{name}")
        elif isinstance(value, Mapping) and isinstance(current, dict):
            setattr(config, name, {**current, **value})
        else:
            setattr(config, name, value)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide the progress bar of every rank's model load."""
    from transformers.utils import logging as hf_logging

    was_on = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            hf_logging.enable_progress_bar()


def save_language_model(
    state: Mapping[str, torch.Tensor], config: PreTrainedConfig, folder: Path, trust_remote_code: bool = False
) -> None:
    """Write configuration and whole weights (under the module's names, tied ones once) for `from_pretrained`."""
    twin = build_language_model(config, torch.float32, trust_remote_code)
    twin.load_state_dict(dict(state), strict=False, assign=True)
    twin.tie_weights()
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        twin.config.dtype = dtypes.pop()
    with _no_progress_bar():
        twin.save_pretrained(folder)
