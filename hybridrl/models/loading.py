"""Reads Hugging Face configurations, and builds models with or without weights.

A model is built in one of two ways. A rank that holds the weights gets them from `load_...` (`from_pretrained`,
which also knows how a checkpoint's names map onto the module). A rank of several, which will get its shards from the
first rank, builds an empty model on the meta device, which takes no memory and almost no time. The first rank reads
the weights by `hybridrl.models.stored`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from hybridrl.errors import ModelError
from hybridrl.models.model_config import checked_source
from hybridrl.models.surplus import check_surplus
from hybridrl.models.vision import is_vision_model
from hybridrl.utils import device
from hybridrl.utils.files import use_umask

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
    """Return the torch dtype of a configured name. `auto` is the half precision of a GPU and float32 on a CPU.

    Raises:
        ModelError: the name is unknown; the error names the configuration key.
    """
    if name == "auto":
        return device.half_precision() if device.is_gpu() else torch.float32
    if name not in DTYPES:
        raise ModelError(f"{key}={name!r} is no dtype; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def check_weights(path: str | Path) -> None:
    """Raise `ModelError` for a local directory whose weights are missing, or were not copied completely."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return
    for file in sorted(folder.glob("*.safetensors")):
        if (fault := _incomplete(file)) is not None:
            raise ModelError(f"{file} is not complete: {fault}. Copy or download it again")
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} cannot be read ({type(error).__name__}: {error}). Copy it again") from error
        missing = sorted(name for name in named if not (folder / name).is_file())
        if missing:
            raise ModelError(
                f"{folder} lacks {', '.join(missing)}, which {index.name} names. Copy or download them again"
            )
    if not any(any(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        raise ModelError(
            f"model directory {folder} holds no weights (no {' and no '.join(WEIGHT_PATTERNS)}); "
            "copy the model's weight files there or name another directory"
        )


def _incomplete(file: Path) -> str | None:
    """Return why a safetensors file cannot be whole, by its header; None if it can."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size - 8:
            pointer = start.startswith(b"version")
            return "it is a pointer of Git LFS, not the file itself" if pointer else f"it has {size} bytes"
        try:
            header = json.loads(opened.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return "its header cannot be read"
    expected = 8 + length + max(ends, default=0)
    return None if size == expected else f"it has {size} bytes, and its header describes {expected}"


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that makes the language model of a configuration, of a vision-language model too."""
    return AutoModelForImageTextToText if is_vision_model(config) else AutoModelForCausalLM


def build_language_model(
    config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build a causal language model without weights: parameters and buffers are on the meta device."""
    model: PreTrainedModel = call_from_config(auto_class(config), config, dtype, trust_remote_code)
    _record_conversions(model)
    return model


def call_from_config(
    auto_class: Any, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False
) -> Any:
    """Call `auto_class.from_config` on the meta device, and leave `config` as it is."""
    options = {"trust_remote_code": True} if trust_remote_code else {}
    stored = config.dtype
    try:
        with torch.device("meta"), _default_dtype(dtype):
            return auto_class.from_config(config, dtype=dtype, **options)
    finally:
        config.dtype = stored  # of the checkpoint, in which its weights are read and written


def load_language_model(
    path: str | Path, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a causal language model with its weights in `dtype`, in main memory.

    Raises:
        ModelError: there are no weights, or they do not fit the configuration (missing names or other shapes).
    """
    model: PreTrainedModel = call_from_pretrained(auto_class(config), path, config, dtype, trust_remote_code)
    return model


def call_from_pretrained(
    auto_class: Any,
    path: str | Path,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    trust_remote_code: bool = False,
) -> Any:
    """Call `auto_class.from_pretrained`, and turn any failure into a `ModelError`."""
    source = checked_source(path)
    check_weights(source)
    options = {"trust_remote_code": True} if trust_remote_code else {}
    tables: list[str] = []
    try:
        with without_progress_bar(), load_reports_in(tables):
            model, report = auto_class.from_pretrained(
                source, config=config, dtype=dtype, output_loading_info=True, **options
            )
    except Exception as error:  # transformers may raise anything for a broken file
        raise ModelError(
            "\n".join([f"the weights of {source} cannot be loaded: {type(error).__name__}: {error}", *tables])
        ) from error
    check_missing(model, report["missing_keys"], source)
    check_surplus(model, report["unexpected_keys"], source)
    return model


def check_missing(model: Any, missing: Iterable[str], source: str | Path) -> None:
    """Raise `ModelError` if a model has tensors that its files lack.

    Args:
        model: what was loaded.
        missing: their names.
        source: the folder, or the model on the hub.
    """
    if names := sorted(missing):
        raise ModelError(
            f"the weights of {source} do not fill the model {type(model).__name__}: {len(names)} missing, the first "
            f"{', '.join(names[:3])}; config.json and the weight files belong to different models"
        )


def decoder_layer_classes(model: nn.Module, configured: Any = None) -> set[str]:
    """Return the class names of the blocks that are sharded separately: the configured ones, else the model's list."""
    if configured:
        return {configured} if isinstance(configured, str) else set(configured)
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return names


def layer_of(name: str) -> str:
    """The part of a parameter's name that all parameters of its layer share; its whole name outside of layers."""
    match = re.match(r".*?\.\d+\.", name)
    return match.group() if match else name


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

    for _, group in itertools.groupby(tensors, key=lambda item: layer_of(item[0])):
        yield from revert_weight_conversion(model, dict(group)).items()


def _record_conversions(model: PreTrainedModel) -> None:
    """Have a model keep how its tensors become those of its checkpoints, as one that was loaded does.

    transformers finds some of the conversions by the name of the class, which FSDP2 replaces.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    if weight_conversions := [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]:
        model._weight_conversions = weight_conversions


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


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def load_reports_in(tables: list[str]) -> Iterator[None]:
    """Collect the tables that transformers logs about weights that do not fit, which errors refer to."""

    def keep(record: logging.LogRecord) -> bool:
        is_report = "LOAD REPORT" in record.getMessage()
        if is_report:
            tables.append(record.getMessage())
        return not is_report

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@contextlib.contextmanager
def without_progress_bar() -> Iterator[None]:
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
    with without_progress_bar():
        twin.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        use_umask(file)
