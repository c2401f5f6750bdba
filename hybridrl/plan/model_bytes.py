"""Memory of a model on one device, in closed form.

Units are bytes; P parameters, n devices, s devices that share one copy of the weights (FSDP2), t, c, e, p sizes of
tensor, context, expert and pipeline parallelism, T tokens of a micro-batch on a device, L layers, H hidden size, V
vocabulary. Fields of a layout may be arrays [K]. The forecast (`hybridrl.forecast`) counts every allocation instead;
these terms are for comparing layouts, and a run computes the forecast before it loads a model.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridrl.plan.seconds import StepSize, TrainingLayout
from hybridrl.plan.shapes import ModelShape

RESERVED = 0.1  # of a device: CUDA context, NCCL, fragmentation
_LOGIT_BYTES = 2  # bfloat16; kernels for GPUs write the gradient in its place
_FUSED_LOGITS = 2 * 2**27 * 4  # bytes: a few tiles of at most 2^27 logits
_REDUCED_BYTES = 6  # of an element while its gradient is reduced: bfloat16 and float32


@dataclass(frozen=True)
class MemoryTerms:
    """Bytes of one role on one device; values may be arrays [K].

    Attributes:
        resident: between uses.
        update: peak of an update, in all.
        pass_peak: peak of a pass without gradients, in all.
    """

    resident: Any
    update: Any
    pass_peak: Any


def _widths(model: ModelShape) -> tuple[int, int, int]:
    """Widths per token of queries, of keys, and of the MLP (that of the experts that a token passes)."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if model.latent is not None:
        queries = keys = model.heads * (model.latent.plain + model.latent.rotary)
    width = model.experts_per_token * model.expert_ffn + model.shared_ffn if model.experts else model.ffn
    return queries, keys, width


def layer_bytes(model: ModelShape) -> int:
    """Bytes that a layer keeps per token for its backward pass, without checkpointing, in bfloat16.

    Two norms, each with its input in float32 and two results (16 H); rotated queries and keys, and values (2 (q + 2
    k)); the result of attention, twice (4 q); gate, up, activation and product of the MLP (8 F). Where a token
    passes k experts, its copies for them, before and after, and their sum (4 k H + 8 H).
    """
    queries, keys, width = _widths(model)
    copies = (4 * model.experts_per_token + 8) * model.hidden if model.experts else 0
    return 16 * model.hidden + 2 * (queries + 2 * keys) + 4 * queries + 8 * width + copies


def _activations(model: ModelShape, layout: TrainingLayout, step: StepSize) -> tuple[Any, Any]:
    """Bytes of an update, and of a pass without gradients.

    Update with checkpointing: 2 L H T + max(a layer's + gradients, 2 V of each response token); without: L x a layer's
    + max(gradients, 2 V). Gradients: 4 F + 3 H, and 9 H of the last norm where it is kept. A pipeline's first stage
    keeps those of p micro-batches. A pass: max(6 F + 8 H, 2 V).
    """
    tensor, pipeline = np.asarray(layout.tensor), np.asarray(layout.pipeline)
    tokens = np.maximum(layout.micro_tokens, step.sequence / np.asarray(layout.context))
    per_token, width = layer_bytes(model), _widths(model)[2]
    layers = model.layers / pipeline
    words = tokens * step.longest / step.sequence * model.vocabulary / tensor * _LOGIT_BYTES
    logits = np.where(np.asarray(layout.fused) > 0, _FUSED_LOGITS, words)
    share = tokens / tensor
    inputs = 2 * model.hidden * share * layers * pipeline
    gradients = (4 * width + 3 * model.hidden) * share
    checkpointed = inputs + np.maximum(per_token * share + gradients, logits)
    whole = per_token * share * layers * pipeline + np.maximum(gradients + 9 * model.hidden * share, logits)
    update = np.where(np.asarray(layout.recompute) > 0, checkpointed, whole)
    return update, np.maximum((6 * width + 8 * model.hidden) * share, logits)


def _sharded(model: ModelShape, n: int, layout: TrainingLayout, trains: bool) -> tuple[Any, Any, Any, Any]:
    """FSDP2: weights, optimizer state, gradients, and what is gathered."""
    size = model.parameters
    if n == 1:
        return (6 if trains else 2) * size, 8 * size * trains, 4 * size * trains, 0
    shards = np.asarray(layout.shards)
    ends = model.embedding * (1 if model.tied else 2)
    elsewhere = model.expert_parameters * (1 - 1 / np.asarray(layout.expert))  # experts of other ranks
    layer = (size - ends - elsewhere) / model.layers
    largest = np.maximum(layer, 0 if model.tied else model.embedding)
    rest = model.embedding if model.tied else 0
    unsharded = rest + (0 if model.tied else model.embedding) + 2 * largest
    buffer = np.maximum(largest, rest)
    gathered = 2 * (np.minimum(unsharded, size - elsewhere) + buffer) + (buffer * _REDUCED_BYTES if trains else 0)
    return (4 if trains else 2) * size / shards, 8 * size * trains / shards, 4 * size * trains / shards, gathered


def _split(model: ModelShape, n: int, layout: TrainingLayout, trains: bool) -> tuple[Any, Any, Any, Any]:
    """Megatron-core: weights in bfloat16, distributed optimizer (12 bytes per parameter), gradients in float32."""
    pipeline, expert = np.asarray(layout.pipeline), np.asarray(layout.expert)
    ends = model.embedding * (1 if model.tied else 2)
    dense = (model.parameters - model.expert_parameters - ends) / (layout.tensor * pipeline)
    dense = dense + ends / layout.tensor / np.minimum(pipeline, 1 if model.tied else 2)
    experts = model.expert_parameters / (expert * pipeline)
    local = dense + experts
    copies = n / (np.asarray(layout.tensor) * pipeline)
    states = 12 * (dense / copies + experts / np.maximum(n / (expert * pipeline), 1))
    return 2 * local, states * trains, 4 * local * trains, 0


def model_memory(model: ModelShape, n: int, layout: TrainingLayout, step: StepSize, trains: bool) -> MemoryTerms:
    """Return the bytes on one of n devices.

    Args:
        trains: whether the role is updated; a frozen model has weights in bfloat16 alone.
    """
    parts = _sharded if layout.sharded else _split
    weights, states, gradients, gathered = parts(model, n, layout, trains)
    update, without = _activations(model, layout, step)
    offload = np.asarray(layout.offload)
    flat = 0 if layout.sharded else gradients  # those of Megatron-core stay
    resident = np.where(offload >= 2, 0, weights) + np.where(offload >= 1, 0, states) + flat
    peak = weights + states + gradients + gathered + update if trains else 0
    used = weights + flat + np.where(offload >= 1, 0, states)
    return MemoryTerms(resident, peak, np.maximum(resident, used) + gathered + without)
