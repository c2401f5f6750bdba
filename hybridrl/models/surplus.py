"""Tensors of weight files that a model does not have: which of them it can do without."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import cached_file

from hybridrl.errors import ModelError
from hybridrl.notify import notify

#: buffers that a model computes, which older files hold
_COMPUTED = re.compile(
    r"rotary_(?:pos_)?emb\.(?:original_)?inv_freq$|(?:^|\.)position_ids$|attn(?:ention)?\.(?:masked_)?bias$"
)
#: heads of the other kinds of model: a value model starts from a language model, and the reverse
_HEADS = re.compile(r"^(?:lm_head|score|v_head|classifier|value_head)\.")
_TOP = re.compile(r"^\w+\.(?:weight|bias)$")
#: layers that predict further tokens
_FURTHER = re.compile(r"(?:^|\.)(?:mtp|nextn|mtp_layers|mtp_block|eh_proj|enorm|hnorm)(?:\.|$)")
_LAYER = re.compile(r"(?:^|\.)layers\.(?P<layer>\d+)\.")
#: parts that read images, videos or sound
_TOWER = re.compile(
    r"(?:^|\.)(?:visual|vision|vision_\w+|image_newline|multi_modal_projector|mm_projector|audio|audio_\w+)(?:\.|$)"
)
_NAMED = 3  # in a message


def check_surplus(model: Any, unexpected: Iterable[str], source: str | Path) -> None:
    """Refuse weights of which the model would use only a part.

    Buffers that are computed, heads of other kinds of model and layers that predict further tokens (which are named)
    are no part of the model that is trained. Layers that `model.override_config` takes away are named, too.

    Args:
        model: what was loaded.
        unexpected: names of the files' tensors that it has no place for, as transformers reports them.
        source: the folder, or the model on the hub.

    Raises:
        ModelError: tensors are left over; the message names the first ones, their number and the remedy.
    """
    names = sorted(unexpected)
    further = [name for name in names if is_further(name, model.config)]
    is_backbone = model.get_output_embeddings() is None  # whose output layer, by whatever name, is left out
    surplus = [name for name in names if name not in further and not is_replaceable(name)]
    surplus = [name for name in surplus if not (is_backbone and _TOP.match(name))]
    towers = [name for name in stored_names(source) if _TOWER.search(name)]
    if towers and not any(_TOWER.search(name) for name, _ in model.named_modules()):
        raise ModelError(
            f"{source} has {len(towers)} tensors of parts that read images or sound ({_first(towers)}), and "
            f"{type(model).__name__}, which its config.json names, has none: they would be neither used nor saved. "
            "Name a model whose images are read here (docs/vision.md), or save its language model by itself "
            "(AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER)) and name that folder"
        )
    if surplus and not warn_if_shortened(surplus, model.config, source):
        raise ModelError(
            f"{source} has {len(surplus)} tensors that {type(model).__name__} has no place for ({_first(surplus)}); "
            f"it would compute something else without them.{_layers(surplus, model.config)} Name the model that the "
            "weights belong to, correct its config.json (or model.override_config), or remove these tensors from the "
            "files if they are of no use"
        )
    if further:
        notify(
            f"{source}: {len(further)} tensors that predict further tokens ({_first(further)}) are neither trained nor "
            "saved",
            once=True,
        )


def warn_if_shortened(surplus: Sequence[str], config: PreTrainedConfig, source: str | Path) -> bool:
    """Return whether all tensors are of layers that the user's settings removed, and warn if they are.

    These are layers that the model's own config.json has and `config` has not (`model.override_config`).
    """
    try:
        shipped = AutoConfig.from_pretrained(source, local_files_only=True).get_text_config().num_hidden_layers
    except (OSError, ValueError, AttributeError):  # code of its own, or no number of layers
        return False
    used = int(config.get_text_config().num_hidden_layers)
    layers = [_LAYER.search(name) for name in surplus]
    if not all(layer is not None and used <= int(layer["layer"]) < shipped for layer in layers):
        return False
    notify(
        f"{source}: model.override_config sets num_hidden_layers={used}, so {len(surplus)} tensors of further layers "
        f"({_first(list(surplus))}) are neither used nor saved",
        "warning",
        once=True,
    )
    return True


def is_replaceable(name: str) -> bool:
    """Whether a tensor is a buffer that models compute, or the head of another kind of model."""
    return _COMPUTED.search(name) is not None or _HEADS.match(name) is not None


def is_further(name: str, config: PreTrainedConfig) -> bool:
    """Whether a tensor is of a layer that predicts further tokens, which follow the model's own layers."""
    text = config.get_text_config()
    layers, more = int(text.num_hidden_layers), int(getattr(text, "num_nextn_predict_layers", None) or 0)
    layer = _LAYER.search(name)
    numbered = layer is not None and layers <= int(layer["layer"]) < layers + more
    return numbered or _FURTHER.search(name) is not None


def stored_names(source: str | Path) -> set[str]:
    """The names of the tensors in the safetensors files of a folder, or of a model of the hub that was downloaded."""
    folder = Path(source)
    if not folder.is_dir():
        options = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
        config = cached_file(str(source), "config.json", **options)
        if config is None:
            return set()
        folder = Path(config).parent
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            names |= set(tensors.keys())
    return names


def _first(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _layers(surplus: list[str], config: PreTrainedConfig) -> str:
    """Return a sentence about the numbers of layers in the files and the configuration, where layers are left over."""
    layers = [int(match["layer"]) for name in surplus if (match := _LAYER.search(name)) is not None]
    number = int(config.get_text_config().num_hidden_layers)
    if not layers or max(layers) < number:
        return ""
    return f" The files have {max(layers) + 1} layers, and config.json has num_hidden_layers={number}."
