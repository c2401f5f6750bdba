"""Selection of a model's attention, and attention over packed rows without a package besides torch.

A packed row holds several sequences one after the other, and `cu_seq_lens_q` says where each begins. A GPU has kernels
for that (`hybridrl.utils.varlen`); on a CPU, attention runs over one sequence at a time. The ranks of a group may share
the row, see `hybridrl.models.ulysses`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.functional import pad
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hybridrl.errors import ModelError
from hybridrl.models.ulysses import heads_to_tokens, in_every_layer, tokens_to_heads
from hybridrl.utils import device, varlen

#: name of this module's attention in transformers; without boundaries it is sdpa
VARLEN = "hybridrl_varlen"
#: kinds of layers whose only path between tokens is attention over the row
_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
#: parts of names of settings that only models with recurrent layers have
_RECURRENT = ("mamba", "ssm", "linear_", "recurrent", "lru", "rwkv", "conv_L")
LARGEST_HEAD = 256
_UNPACKED = "model.use_remove_padding=False"
_HEAD_MULTIPLE = 8  # the kernel takes heads of these sizes only

_packed: ContextVar[bool] = ContextVar("hybridrl_packed", default=False)
_shared: ContextVar[bool] = ContextVar("hybridrl_shared", default=False)
#: within `trial`, what was found instead of being raised
_problems: ContextVar[list[str] | None] = ContextVar("hybridrl_problems", default=None)


def attention_implementation(config: PreTrainedConfig, override: Mapping[str, Any]) -> str:
    """Choose the attention implementation: that of the override, else one that can pack, else sdpa.

    Where it fits, a model gets this module's attention if that has a faster kernel than the flash attention of
    transformers. A model with a sliding window gets it in any case: some apply the window by the mask alone (Qwen2-MoE,
    Phi-MoE), which flash attention does not read.
    """
    implementation = override.get("attn_implementation")
    if implementation is not None:
        return str(implementation)
    fits = device.supports_varlen_attention() and not (
        packing_unsupported_reason(config) or varlen_unsupported_reason(config)
    )
    if fits and (has_window(config) or varlen.has_package()):
        return VARLEN
    flash = device.flash_attention()
    if flash is not None and fits_flash_attention(config, flash):
        return flash
    return VARLEN if fits else plain_attention(config)


def fits_flash_attention(config: PreTrainedConfig, implementation: str) -> bool:
    """Whether transformers computes this model with this flash attention of an installed package."""
    model_class = model_class_of(config) or _class_of(config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    compatible = getattr(model_class, "_compatible_flash_implementations", None)
    return (
        bool(getattr(model_class, "_supports_flash_attn", False))
        and (compatible is None or implementation in compatible)
        and _largest_head(config) <= LARGEST_HEAD
    )


def has_window(config: PreTrainedConfig) -> bool:
    """Whether layers of the model may have a sliding window."""
    return bool(config.get_text_config().to_dict().get("sliding_window"))


def plain_attention(config: PreTrainedConfig) -> str:
    """The attention that needs no package and no GPU: sdpa, or eager where transformers has no sdpa (gpt-oss)."""
    return "sdpa" if getattr(model_class_of(config), "_supports_sdpa", True) else "eager"


def takes_boundaries(implementation: str) -> bool:
    """Whether this attention keeps the sequences of a packed row apart by `cu_seq_lens_q`."""
    return implementation == VARLEN or is_flash_attention(implementation)


def is_flash_attention(implementation: str) -> bool:
    """Whether this is flash attention: of an installed package, of any version, or a kernel from the hub."""
    return implementation.startswith("flash_attention") or "flash-attn" in implementation


def packing_unsupported_reason(config: PreTrainedConfig) -> str | None:
    """Return why sequences of this model may not share a row; None if they may.

    Attention learns where a sequence begins. Recurrent layers do not, so their state would leak into the next one.
    """
    text = config.get_text_config()
    model_class = model_class_of(config)
    if model_class is None:
        return "it is not a plain causal language model of transformers"
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _PACKABLE_LAYERS)
    if others:
        return f"it has layers of kind {', '.join(others)}"
    recurrent = sorted(name for name in text.to_dict() if any(part in name for part in _RECURRENT))
    if recurrent or getattr(model_class, "_is_stateful", False):
        return f"it has recurrent layers ({', '.join(recurrent) or model_class.__name__})"
    return None


def replacing_unsupported_reason(config: PreTrainedConfig) -> str | None:
    """Return why the model's attention cannot be computed by one of ours; None if it can."""
    text, model_class = config.get_text_config(), model_class_of(config)
    for name in ("_supports_flash_attn", "_supports_sdpa", "_supports_attention_backend"):
        if not getattr(model_class, name, False):
            return f"its code does not let its attention be replaced ({name} is False)"
    for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if getattr(text, name, None):
            return f"the attention that is there for it does not support its {name}={getattr(text, name)}"
    return None


def varlen_unsupported_reason(config: PreTrainedConfig) -> str | None:
    """Return why this module's attention does not fit the model; None if it does."""
    reason = replacing_unsupported_reason(config)
    if reason is not None:
        return reason
    if (size := _largest_head(config)) > LARGEST_HEAD:
        return f"the kernel in PyTorch supports attention heads up to size {LARGEST_HEAD}, not {size}"
    return None


def _largest_head(config: PreTrainedConfig) -> int:
    """The size of the model's largest attention heads; 0 if its configuration does not say."""
    settings = config.get_text_config().to_dict()
    layers = [settings, *(settings.get("per_layer_config") or {}).values()]
    sizes = [size for layer in layers for name, size in layer.items() if name.endswith("head_dim") and size]
    if not sizes and settings.get("hidden_size") and settings.get("num_attention_heads"):
        sizes = [settings["hidden_size"] // settings["num_attention_heads"]]
    return max(sizes, default=0)


def model_class_of(config: PreTrainedConfig) -> Any:
    """The class of causal language models with this configuration, if transformers has one."""
    return _class_of(config, MODEL_FOR_CAUSAL_LM_MAPPING)


def _class_of(config: PreTrainedConfig, mapping: Any) -> Any:
    model_class = mapping.get(type(config), None)
    return model_class[0] if isinstance(model_class, tuple) else model_class


@contextlib.contextmanager
def packed_row(shared_by: PreTrainedConfig | None = None) -> Iterator[None]:
    """Make no attention mask within the context: the attention gets the boundaries of the sequences instead.

    Args:
        shared_by: where the ranks of a group share the row, the model's configuration: every attention of the forward
            pass in the context has to know the group.
    """
    packed, sharing = _packed.set(True), _shared.set(shared_by is not None)
    try:
        with contextlib.nullcontext() if shared_by is None else in_every_layer(shared_by):
            yield
    finally:
        _packed.reset(packed)
        _shared.reset(sharing)


@contextlib.contextmanager
def trial() -> Iterator[list[str]]:
    """Collect, within the context, what a model cannot do in a list instead of raising it.

    Refused layers return zeros, so that a forward pass always ends, and with it the collectives of all ranks.
    """
    problems: list[str] = []
    token = _problems.set(problems)
    try:
        yield problems
    finally:
        _problems.reset(token)


def refuse(problem: str, remedy: str) -> None:
    """Raise a `ModelError`, or within `trial` add the problem to its list."""
    problems = _problems.get()
    if problems is None:
        raise ModelError(f"{problem}; set {remedy}")
    problems.append(problem)


def mask_of_window(**arguments: Any) -> torch.Tensor | None:
    """Return the stand-in for a layer's causal mask: an empty tensor `[window, 1, 0, 0]`, or None without a window."""
    if arguments.get("use_vmap"):  # the model has changed the mask, which the layer refuses
        return sdpa_mask(**arguments)
    window = arguments.get("local_size")
    return None if window is None else torch.empty(window, 1, 0, 0, dtype=torch.bool, device=arguments["device"])


def window_of(attention_mask: torch.Tensor | None, sliding_window: int | None) -> int:
    """Return the number of tokens a layer attends to, by its mask (`mask_of_window`) and its argument; 0 for all."""
    of_mask = 0 if attention_mask is None else int(attention_mask.shape[0])
    of_argument = sliding_window or 0
    return min(of_mask, of_argument) if of_mask and of_argument else of_mask or of_argument


def not_computed(attention_mask: torch.Tensor | None, further: Mapping[str, Any]) -> list[str]:
    """Return the features that a layer needs and that attention by boundaries or along paths does not compute."""
    names = [name for name in ("softcap", "s_aux", "position_bias") if further.get(name) is not None]
    return [*names, *(["a mask of its own"] if attention_mask is not None and attention_mask.numel() else [])]


def zeros(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return zeros in place of the attention of a layer that was refused within `trial`."""
    batch, heads, tokens, _ = query.shape
    return query.new_zeros(batch, tokens, heads, value.shape[-1])


def _mask(**arguments: Any) -> torch.Tensor | None:
    return mask_of_window(**arguments) if _packed.get() else sdpa_mask(**arguments)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    sequence_group: ProcessGroup | None = None,
    **further: Any,
) -> tuple[torch.Tensor, None]:
    """An attention of transformers: query `[B, H, S, D]`, key and value `[B, G, S, D]`, result `[B, S, H, D]`.

    Args:
        sequence_group: the ranks that share the row; the tensors hold this rank's part of its tokens.

    Raises:
        ModelError: a packed row comes without its boundaries, or with something that the kernel does not compute.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if (
        not torch.compiler.is_compiling()
        and _shared.get()
        and (sequence_group is None or cu_seq_lens_q is None or not causal)
    ):
        problem = "does not pass on which ranks share the sequences" if causal else "is not causal"
        raise ModelError(f"{type(module).__name__} {problem}; set ulysses_sequence_parallel_size=1")
    if cu_seq_lens_q is None or not causal:
        if _packed.get() and (causal or (attention_mask is not None and not attention_mask.numel())):
            problem = "does not pass on where packed sequences begin" if causal else "has a window and is not causal"
            refuse(f"{type(module).__name__} {problem}", _UNPACKED)
            return zeros(query, value), None
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **further
        )
        return result
    if unknown := not_computed(attention_mask, further):
        problem = "which attention over packed rows does not compute"
        refuse(f"{type(module).__name__} uses {', '.join(unknown)}, {problem}", _UNPACKED)
        return zeros(query, value), None
    window = window_of(attention_mask, sliding_window)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    assert max_length_q is not None
    if sequence_group is not None:
        query, key, value = tokens_to_heads(query, key, value, sequence_group)
    out = packed_attention(query, key, value, cu_seq_lens_q, max_length_q, scaling, window)
    if sequence_group is not None:
        out = heads_to_tokens(out, sequence_group)
    return out[None], None


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Causal attention within each sequence of a packed row, `[L, H, D of value]`; see `varlen.varlen_attention`.

    Heads may be of any size, and those of values of another one than those of queries and keys.
    """
    size = value.shape[-1]
    query, key, value = of_one_size(query, key, value)
    on_kernel = query.is_cuda and query.dtype != torch.float32
    attend = varlen.varlen_attention if on_kernel else varlen.one_by_one
    return attend(query, key, value, varlen.PackedRows(boundaries, longest, window), scale)[:, :, :size]


def of_one_size(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with zeros appended to each head, up to the next size that the kernel takes."""
    width = max(tensor.shape[-1] for tensor in tensors)
    width += -width % _HEAD_MULTIPLE
    return [pad(t, [0, width - t.shape[-1]]) if t.shape[-1] < width else t for t in tensors]


AttentionInterface.register(VARLEN, _attention)
AttentionMaskInterface.register(VARLEN, _mask)
