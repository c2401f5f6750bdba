"""Losses of datums, summed over target tokens: what clients of the training server ask for by name.

A datum is a sequence of N tokens with a target token for each position; with `several_targets`, K of them. A loss
returns one value per target, and the server sums them. It averages nothing: a client that wants a mean puts it into its
weights.

Legend: B datums, T positions, K targets of a position; p policy, q the sampler; r = p / q, the ratio of a target token.

    @register_datum_loss("mine", inputs=("advantages",))
    def mine(log_probs, inputs, config):
        return -log_probs * inputs["advantages"]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hybridrl.registry import DATUM_LOSSES
from hybridrl.utils.entry_metadata import DatumMetadata

#: log p `[B, T, K]`, the inputs `[B, T, K]` by name, the numbers by name -> the loss of each target `[B, T, K]`
DatumLossFn = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]


def register_datum_loss(
    name: str,
    *,
    inputs: tuple[str, ...],
    config: Mapping[str, float | None] | None = None,
    several_targets: bool = False,
) -> Callable[[DatumLossFn], DatumLossFn]:
    """Return a decorator that registers a loss of datums. A name taken by another function is refused.

    Args:
        name: value of `loss_fn` of a request.
        inputs, config, several_targets: see `hybridrl.utils.entry_metadata.DatumMetadata`.
    """

    def decorate(fn: DatumLossFn) -> DatumLossFn:
        metadata = DatumMetadata(inputs=inputs, config=config or {}, several_targets=several_targets)
        DATUM_LOSSES.add(name, fn, metadata)
        return fn

    return decorate


@register_datum_loss("cross_entropy", inputs=("weights",), several_targets=True)
def cross_entropy(log_probs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-w log p."""
    return -log_probs * inputs["weights"]


@register_datum_loss("importance_sampling", inputs=("logprobs", "advantages"))
def importance_sampling(log_probs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-r A, whose gradient is that of the expected reward where q is the distribution of the samples."""
    return -_ratio(log_probs, inputs) * inputs["advantages"]


@register_datum_loss(
    "ppo", inputs=("logprobs", "advantages"), config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
)
def ppo(log_probs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-min(r A, clip(r) A) (Schulman et al., 2017, arXiv 1707.06347, equation 7); the thresholds are those of r."""
    ratio, advantages = _ratio(log_probs, inputs), inputs["advantages"]
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


@register_datum_loss(
    "cispo", inputs=("logprobs", "advantages"), config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
)
def cispo(log_probs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-sg(clip(r)) A log p (MiniMax-M1, 2025, arXiv 2506.13585, equation 4), sg without gradient."""
    weight = _ratio(log_probs, inputs).detach().clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -weight * inputs["advantages"] * log_probs


@register_datum_loss("dro", inputs=("logprobs", "advantages"), config={"beta": None})
def dro(log_probs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-(A log p - beta / 2 (log r)^2) (Richemond et al., 2024, arXiv 2405.19107)."""
    log_ratio = log_probs - inputs["logprobs"]
    return -(log_probs * inputs["advantages"] - config["beta"] / 2 * log_ratio.square())


def _ratio(log_probs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return (log_probs - inputs["logprobs"]).exp()
