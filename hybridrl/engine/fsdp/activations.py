"""Activations of an update: recomputed layers, offloaded inputs of layers, and MLPs computed in tiles."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hybridrl.engine.fsdp.activation_offload import ActivationOffload
from hybridrl.errors import ModelError
from hybridrl.models.loading import decoder_layer_classes
from hybridrl.notify import notify
from hybridrl.utils import distributed

# A gated or plain MLP, which computes each token on its own, has a layer of this name.
_LAST_OF_MLP = ("down_proj", "fc2", "c_proj", "dense_4h_to_h")

# Operations that take most of a layer's time; `selective` keeps their results. Products of batches of matrices are not
# among them: they are the scores of attention that is not fused, which are large.
_LINEAR = ("mm", "addmm", "_grouped_mm", "grouped_mm_fallback")
_ATTENTION = ("attention", "attn")  # part of the name, or of the namespace, of every fused kernel

recomputed = functools.partial(checkpoint, use_reentrant=False)


def check_activations(model: Any, engine: Any) -> None:
    """Refuse settings that do not go together.

    Raises:
        ModelError: the message names both keys.
    """
    if model.enable_activation_offload and not model.enable_gradient_checkpointing:
        raise ModelError(
            "model.enable_activation_offload=True keeps the inputs of checkpointed layers in main memory; set "
            "model.enable_gradient_checkpointing=True, too, or leave it off"
        )
    if model.recompute_granularity == "selective":
        _check_selective(model, engine)
    if model.use_liger and engine.use_torch_compile:
        raise ModelError(
            "model.use_liger=True and fsdp_config.use_torch_compile=True both fuse the operations of a layer; leave "
            "one of them off"
        )
    if model.tiled_mlp.enabled and engine.use_torch_compile:
        raise ModelError(
            "model.tiled_mlp.enabled=True and fsdp_config.use_torch_compile=True were not made to work together; leave "
            "one of them off"
        )


def _check_selective(model: Any, engine: Any) -> None:
    if not model.enable_gradient_checkpointing:
        problem = "model.enable_gradient_checkpointing=False, which computes nothing again; set that to True"
    elif model.tiled_mlp.enabled:
        problem = "model.tiled_mlp.enabled=True, which keeps no results of MLPs; set that to False"
    elif engine.use_torch_compile:
        problem = "fsdp_config.use_torch_compile=True, which hides operations of a layer; set that to False"
    else:
        return
    raise ModelError(
        "model.recompute_granularity=selective keeps results of operations of a checkpointed layer. It cannot be "
        f"combined with {problem}, or set model.recompute_granularity=full"
    )


def save_activations(module: Any, model: Any) -> None:
    """Have a module that will be trained keep what the settings of `model` say.

    Raises:
        ModelError: `tiled_mlp` finds no MLP.
    """
    compute_again = _selectively if model.recompute_granularity == "selective" else recomputed
    if model.enable_activation_offload:
        compute_again = functools.partial(ActivationOffload(), compute_again)
    if model.enable_gradient_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for part in module.modules():
            if hasattr(part, "_gradient_checkpointing_func"):
                part._gradient_checkpointing_func = compute_again
    if model.tiled_mlp.enabled:
        _tile(module, model.tiled_mlp.num_shards)


def _selectively(function: Any, *arguments: Any, **named: Any) -> Any:
    """Checkpoint `function`, and keep the results of what takes most of its time."""
    contexts = functools.partial(create_selective_checkpoint_contexts, recompute_policy)
    return recomputed(function, *arguments, context_fn=contexts, **named)


def recompute_policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    whole = operation.name()  # aten::mm, flash_attn_3::fwd, flex_attention
    name = whole.rpartition("::")[2].partition(".")[0]
    must_save = name in _LINEAR or any(part in whole for part in _ATTENTION)
    return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE


def _tile(module: nn.Module, tiles: int) -> None:
    """Compute the MLP of each layer for a part of the tokens at a time, forward and backward."""
    classes = decoder_layer_classes(module)
    layers = [part for part in module.modules() if type(part).__name__ in classes]
    mlps = [getattr(layer, "mlp", None) for layer in layers]
    tileable = [mlp for mlp in mlps if any(isinstance(getattr(mlp, name, None), nn.Module) for name in _LAST_OF_MLP)]
    if not tileable:
        raise ModelError(
            f"model.tiled_mlp.enabled=True: {type(module).__name__} has no MLP that computes each token on its own; "
            "set it to False"
        )
    if len(tileable) < len(layers) and distributed.get_rank() == 0:
        notify(
            f"model.tiled_mlp.enabled=True acts on {len(tileable)} of {len(layers)} layers of {type(module).__name__}: "
            "those with a plain or gated MLP, not those with a mixture of experts",
            once=True,  # the forecast of memory says it, too
        )
    for mlp in tileable:
        mlp.forward = functools.partial(_in_tiles, mlp.forward, tiles)  # type: ignore[union-attr]


def _in_tiles(forward: Any, tiles: int, hidden: torch.Tensor) -> torch.Tensor:
    tokens = hidden.reshape(-1, hidden.shape[-1])
    return torch.cat([recomputed(forward, tile) for tile in tokens.chunk(tiles)]).view_as(hidden)
