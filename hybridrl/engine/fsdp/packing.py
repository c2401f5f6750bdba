"""Checks that an engine's attention computes the model's own, and packs sequences (`model.use_remove_padding`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from hybridrl.engine.fsdp.sharing import with_attention
from hybridrl.engine.microbatch import MicroBatchLayout
from hybridrl.errors import ModelError
from hybridrl.models import attention, loading
from hybridrl.notify import notify
from hybridrl.utils import device, distributed

_ASKING = "hybridrl_asking"
#: tokens of each row of the trial
_LENGTH = 4


def check_attention(model: Any, engine: Any) -> None:
    """Refuse flash attention in float32, which its kernels do not compute.

    Args:
        model: a `ModelConfig`.
        engine: an `FSDPConfig`.

    Raises:
        ModelError: the message names both keys.
    """
    implementation = str(model.override_config.get("attn_implementation", ""))
    if attention.is_flash_attention(implementation) and loading.DTYPES.get(engine.dtype) is torch.float32:
        raise ModelError(
            f"model.override_config.attn_implementation={implementation} computes half precision only, and "
            f"fsdp_config.dtype={engine.dtype}; set that to bfloat16, or remove the attention"
        )


def check_windows(module: nn.Module, compute: Callable[[MicroBatchLayout], Any]) -> None:
    """Refuse flash attention where a model applies its sliding window by the mask alone, which it does not read.

    A forward pass without attention shows which arguments the layers pass to it. Collective.

    Raises:
        ModelError: it names the layer and the setting.
    """
    config: Any = module.config
    implementation, masked_layers = str(config._attn_implementation), list[str]()
    if not (attention.is_flash_attention(implementation) and attention.has_window(config)):
        return

    def ask(
        layer: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is not None and sliding_window is None:
            masked_layers.append(type(layer).__name__)
        return attention.zeros(query, value), None

    AttentionInterface.register(_ASKING, ask)
    AttentionMaskInterface.register(_ASKING, attention.mask_of_window)
    with with_attention(module, _ASKING):
        _states(module, compute, _layout(torch.arange(_LENGTH), None))
    if masked_layers:
        raise ModelError(
            f"{masked_layers[0]} applies its sliding window by the mask alone, which {implementation} does not read; "
            "set model.override_config.attn_implementation=sdpa"
        )


def may_pack(path: str, config: PreTrainedConfig, dtype: torch.dtype) -> bool:
    """Whether the model's configuration and its attention let sequences share a row; on a GPU, warn if not."""
    implementation = str(config._attn_implementation)
    reason = attention.packing_unsupported_reason(config)
    if reason is None and not attention.takes_boundaries(implementation):
        reason = attention.varlen_unsupported_reason(config) or f"its attention is {implementation}, in {dtype}"
    if reason is not None and device.is_gpu():
        _warn_unpacked(path, reason)
    return reason is None


def keeps_rows_apart(
    path: str, module: nn.Module, compute: Callable[[MicroBatchLayout], Any], dtype: torch.dtype
) -> bool:
    """Whether a model computes two rows in one as it does each alone, tried on short rows; warn if not. Collective.

    Code may fail to pass the boundaries of sequences to its attention, or ignore the positions of tokens. The first
    row has nothing before it, so its difference is that of rounding.

    Args:
        compute: a forward pass of the module, without gradients.
        dtype: that it computes in.
    """
    ids = torch.arange(3, 3 + 2 * _LENGTH) % module.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    first, second = ids.split(_LENGTH)
    with attention.trial() as problems:
        together = _states(module, compute, _layout(ids, [_LENGTH, _LENGTH]))
        apart = torch.cat([_states(module, compute, _layout(row, None)) for row in (first, second)])
    rounding, difference = (
        float((packed - alone).norm() / alone.norm())
        for packed, alone in zip(together.split(_LENGTH), apart.split(_LENGTH), strict=True)
    )
    if not problems and difference > torch.finfo(dtype).eps ** 0.5 + 4 * rounding:
        problems.append("in a packed row its results depend on the sequences before")
    if distributed.all_reduce_max(len(problems)):
        _warn_unpacked(path, problems[0] if problems else "another rank found that they cannot be")
        return False
    return True


def _layout(ids: torch.Tensor, lengths: list[int] | None) -> MicroBatchLayout:
    places = torch.arange(len(ids))
    return MicroBatchLayout(ids[None], places[None] % _LENGTH, places, torch.zeros_like(places), lengths)


def _states(module: nn.Module, compute: Callable[[MicroBatchLayout], Any], layout: MicroBatchLayout) -> torch.Tensor:
    """Return the inputs of the output layer, `[N, H]`; outputs would show nothing, as a new critic's layer is zero."""
    states: list[torch.Tensor] = []
    head: nn.Module = module.get_output_embeddings()  # type: ignore[operator]
    hook = head.register_forward_pre_hook(lambda _, arguments: states.append(arguments[0].float()))
    try:
        compute(layout.to(device.current_device()))
    finally:
        hook.remove()
    return states[0]


def _warn_unpacked(path: str, reason: str) -> None:
    if distributed.get_rank() == 0:
        notify(
            f"sequences of {path} are padded to the longest of their micro-batch and not packed "
            f"(model.use_remove_padding): {reason}"
        )
