"""Seconds of the phases of a step, in closed form.

Every formula is the time of arithmetic or of bytes at a fraction of the data sheet's rate, plus a floor per layer. The
fractions and floors are `CostFactors`. They are fitted to step times that other projects have published
(`hybridrl.plan.published`); no run of this library on several devices is among them.

Legend: n devices, t tensor-parallel size of a replica of the engine, B sequences at once, L layers, P parameters.
Layout fields may be arrays [K] of K candidates; results then have that shape.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridrl.plan.devices import DeviceSheet
from hybridrl.plan.lengths import POINTS, quantiles
from hybridrl.plan.shapes import ModelShape

_EXPERT_SKEW = 1.25  # load of the rank with the most popular experts, relative to the mean
_SEEN = 0.6  # mean of the tokens that sequences have at a time, relative to their mean length
_OVERLAPPED = 0.5  # share of the gradients' reduction that backward passes do not hide
_LINK = 0.7  # of a link's data-sheet rate, in large collectives
_CAPACITY = 1024  # sequences of a replica at once, unless the engine is limited otherwise


@dataclass(frozen=True)
class CostFactors:
    """The factors that are fitted.

    Attributes:
        mfu: of peak FLOPs, in products of training.
        layer_s: seconds per layer and micro-batch of a forward pass.
        expert_layer_s: the same on top for a layer of experts.
        all_to_all: of the link's rate, in exchanges between experts.
        tensor: of the link's rate, in collectives of tensor parallelism.
        decode_flops: of peak FLOPs, in decoding and prefill.
        decode_memory: of the memory's rate, in decoding.
        decode_layer_s: seconds per layer and decode step.
        decode_expert_layer_s: the same on top for a layer of experts.
        reduce_s: seconds of an all-reduce within the fast domain.
        network_reduce_s: of one that leaves it.
        sequence_s: seconds per sequence and decode step: scheduler, sampling, detokenising.
        sigma: standard deviation of the logarithm of response lengths.
        imbalance: the slowest replica or rank, relative to the mean.
        refit_bytes_s: bytes per second at which a model's weights reach the engines.
        fixed_s: seconds of a step for everything else.
        pass_factor: a pass without gradients, relative to a third of forward and backward.
        host_adam_s: seconds per parameter and machine of Adam on the machine's processors.
    """

    mfu: float = 0.55
    layer_s: float = 0.35e-3
    expert_layer_s: float = 1.2e-3
    all_to_all: float = 0.5
    tensor: float = 0.5
    decode_flops: float = 0.45
    decode_memory: float = 0.65
    decode_layer_s: float = 45e-6
    decode_expert_layer_s: float = 60e-6
    reduce_s: float = 12e-6
    network_reduce_s: float = 80e-6
    sequence_s: float = 12e-6
    sigma: float = 0.6
    imbalance: float = 1.15
    refit_bytes_s: float = 25e9
    fixed_s: float = 6.0
    pass_factor: float = 1.2
    host_adam_s: float = 0.6e-9


#: before any fit: textbook values
TEXTBOOK = CostFactors()


@dataclass(frozen=True)
class StepSize:
    """The batch of a step.

    Attributes:
        samples: responses.
        group: responses per prompt.
        prompt, response: mean tokens.
        longest: most tokens of a response.
        updates: optimizer steps.
        sequence: most tokens of a prompt and its response.
    """

    samples: int
    group: int
    prompt: float
    response: float
    longest: int
    updates: int
    sequence: int

    @property
    def length(self) -> float:
        """Mean tokens of a sequence."""
        return self.prompt + self.response


@dataclass(frozen=True)
class TrainingLayout:
    """A layout in which n devices train a model. Fields may be arrays [K].

    Attributes:
        sharded: whether the engine is FSDP2, which gathers weights for each layer; otherwise Megatron-core.
        tensor, context, expert, pipeline: sizes of tensor, context (Ulysses in FSDP2), expert and pipeline parallelism.
        shards: devices that share one copy of the weights (FSDP2).
        micro_tokens: tokens per micro-batch and device.
        recompute: 1 with activation checkpointing, 0 without.
        fused: 1 if logits never exist as a whole, so that the output layer is computed once more.
        offload: 0: everything stays on the device; 1: optimizer state is in host memory between updates; 2: weights
            too.
    """

    sharded: bool
    tensor: Any = 1
    context: Any = 1
    expert: Any = 1
    pipeline: Any = 1
    shards: Any = 1
    micro_tokens: Any = 16384
    recompute: Any = 1
    fused: Any = 0
    offload: Any = 0

    def at(self, index: int) -> "TrainingLayout":
        """The candidate with this index."""
        fields = {name: int(np.asarray(value)[index]) for name, value in vars(self).items() if name != "sharded"}
        return TrainingLayout(self.sharded, **fields)


def _link(device: DeviceSheet, size: Any) -> Any:
    """Bytes per second of a collective over `size` devices."""
    return np.where(np.asarray(size) <= device.domain, device.link_gb_s, device.network_gb_s) * 1e9


def decode_step(model: ModelShape, device: DeviceSheet, factors: CostFactors, t: int, batch: Any, context: Any) -> Any:
    """Seconds of one token for each of `batch` sequences of `context` tokens, on a replica of t devices.

    max(weights read / bandwidth, FLOPs / peak) + keys and values read / bandwidth + 2 L all-reduces + L floors + B
    times the time per sequence.
    """
    keys = batch * context * model.kv_bytes / model.kv_shards(t)
    flops = batch * 2 * (model.active + model.embedding) / t
    bandwidth = device.hbm_tb_s * 1e12 * factors.decode_memory
    weights = np.maximum(model.read_bytes(batch) / t / bandwidth, flops / (device.tflops * 1e12 * factors.decode_flops))
    reduced: Any = 0.0
    if t > 1:
        latency = factors.reduce_s if t <= device.domain else factors.network_reduce_s
        sent = 2 * batch * model.hidden * 2 / (_link(device, t) * factors.tensor)
        reduced = 2 * model.layers * (latency + sent)
    floors = model.layers * factors.decode_layer_s + model.expert_layers * factors.decode_expert_layer_s
    return weights + keys / bandwidth + reduced + floors + batch * factors.sequence_s


def cache_tokens(model: ModelShape, device: DeviceSheet, t: int, share: float) -> float:
    """Tokens whose keys and values fit on a replica of t devices that has `share` of their memory; negative if not
    even the weights do."""
    room = device.memory_gb * 1e9 * share * t - 2 * model.parameters
    return room / (model.kv_bytes * t / model.kv_shards(t))


def _prefill(
    model: ModelShape, device: DeviceSheet, factors: CostFactors, t: int, samples: float, step: StepSize
) -> float:
    """Seconds in which a replica reads prompts, once per group."""
    flops = samples * model.forward_flops(step.prompt, step.prompt) / step.group
    return float(flops / (t * device.tflops * 1e12 * factors.decode_flops))


def generation(
    model: ModelShape,
    device: DeviceSheet,
    factors: CostFactors,
    n: int,
    t: int,
    step: StepSize,
    share: float,
    capacity: int = _CAPACITY,
) -> float:
    """Seconds until the last response of a batch is complete, on n devices in replicas of t; infinite without room.

    The integral of `decode_step` over the tokens of a response, for the sequences that are still active at each. What
    exceeds the cache or `capacity` waits for the places of those that end.
    """
    cache = cache_tokens(model, device, t, share)
    if cache < step.sequence:
        return float("inf")
    samples = step.samples / max(1, n // t) * (1 + (factors.imbalance - 1) / 2)
    wave = max(1.0, min(samples, cache / (step.prompt + step.response * _SEEN), capacity))
    ends = quantiles(round(step.response), round(step.longest), round(factors.sigma, 2))
    active = np.maximum(wave * np.arange(POINTS, 0, -1) / POINTS, 1)
    spans = np.diff(ends, prepend=0)
    steps = decode_step(model, device, factors, t, active, step.prompt + ends - spans / 2)
    seconds = float((spans * steps).sum())
    if samples > wave:
        full = float(decode_step(model, device, factors, t, wave, step.prompt + step.response * _SEEN))
        seconds += (samples - wave) * step.response / wave * full
    return seconds + _prefill(model, device, factors, t, samples, step)


def streaming(
    model: ModelShape, device: DeviceSheet, factors: CostFactors, n: int, t: int, step: StepSize, share: float, lag: int
) -> float:
    """Seconds to generate a step's tokens where requests of `lag` later steps keep the engines full.

    Tokens per replica / B times `decode_step` of B sequences, B = min(cache, (1 + lag) x 0.6 x samples per replica).
    """
    samples = step.samples / max(1, n // t)
    context = step.prompt + step.response * _SEEN
    cache = max(cache_tokens(model, device, t, share), 1 / model.kv_bytes)
    batch = max(1.0, min(cache / context, samples * (1 + lag) * _SEEN, _CAPACITY))
    per_token = float(decode_step(model, device, factors, t, batch, context))
    waiting = samples * step.response / batch * per_token * factors.imbalance
    return waiting + _prefill(model, device, factors, t, samples, step)


def training(
    model: ModelShape,
    device: DeviceSheet,
    factors: CostFactors,
    n: int,
    layout: TrainingLayout,
    step: StepSize,
    backward: bool,
) -> Any:
    """Seconds of a step's updates on n devices (forward and backward), or of one pass without gradients.

    FLOPs x passes / (peak x mfu) + micro-batches x L floors + links of tensor and expert parallelism, times the
    pipeline's bubble 1 + (p - 1) / m, + gathers of FSDP2 that exceed the products + half of the gradients' reduction +
    offloaded bytes / host link.
    """
    tensor, context, expert, pipeline = (
        np.asarray(getattr(layout, name), dtype=float) for name in ("tensor", "context", "expert", "pipeline")
    )
    updates = step.updates if backward else 1
    copies = np.maximum(n / (tensor * context * pipeline), 1)
    tokens = step.samples * step.length / copies
    micro = np.maximum(np.minimum(layout.micro_tokens * context, tokens), step.length)
    micros = np.maximum(1.0, np.ceil(tokens / micro / updates)) * updates
    passes = 3 + np.asarray(layout.recompute) if backward else np.asarray(1)
    flops = model.forward_flops(tokens, step.length) * passes
    flops = flops + np.asarray(layout.fused) * 2 * tokens * model.embedding * (1 if backward else 0)
    skew = np.where(expert > 1, _EXPERT_SKEW, 1.0) if model.experts else 1.0
    products = flops / (tensor * context * pipeline) * skew / (device.tflops * 1e12 * factors.mfu)
    floors = model.layers * factors.layer_s + model.expert_layers * factors.expert_layer_s
    seconds = products + micros * passes / pipeline * floors
    each = tokens / context
    links = 4 * model.layers / pipeline * each * model.hidden * 2 * (tensor - 1) / tensor
    seconds = seconds + passes * links / (device.link_gb_s * 1e9 * factors.tensor)
    if model.experts:
        sent = 2 * model.expert_layers / pipeline * each / tensor * np.minimum(model.experts_per_token, expert)
        exchanged = np.where(expert > 1, passes * sent * model.hidden * 2, 0)
        seconds = seconds + exchanged / (_link(device, expert) * factors.all_to_all)
    seconds = np.where(pipeline > 1, seconds * (1 + (pipeline - 1) / (micros / updates)), seconds)
    reduced = model.parameters / (tensor * pipeline * (expert if model.experts else 1))
    if layout.sharded:
        reduced = gathered = model.parameters - model.expert_parameters * (1 - 1 / expert)
        gathers = micros * (2 if backward else 1) * 2 * gathered * (1 - 1 / np.asarray(layout.shards))
        seconds = np.maximum(seconds, gathers / (_link(device, layout.shards) * _LINK))
    if backward:
        reduction = updates * 2 * 4 * reduced / (_link(device, n) * _LINK) * _OVERLAPPED
        seconds = seconds + np.where(copies > 1, reduction, 0.0)
    seconds = seconds * (1 + (factors.imbalance - 1) / 2) * (1 if backward else factors.pass_factor)
    return seconds + _offloaded(model, device, n, layout, backward)


def _offloaded(model: ModelShape, device: DeviceSheet, n: int, layout: TrainingLayout, backward: bool) -> Any:
    """Seconds in which optimizer state (8 bytes per parameter) and weights (4) come from host memory and go back."""
    offload = np.asarray(layout.offload)
    per_parameter = np.where(offload >= 1, 8 if backward else 0, 0) + np.where(offload >= 2, 4, 0)
    return 2 * per_parameter * model.parameters / n / (device.host_gb_s * 1e9 * _LINK)


def refit(model: ModelShape, factors: CostFactors) -> float:
    """Seconds in which new weights reach the engines: 2 P / rate."""
    return 2 * model.parameters / factors.refit_bytes_s
