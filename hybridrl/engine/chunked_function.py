"""Functions of whole logits (`LogitsFunction`), a chunk of tokens at a time, forward and backward.

Legend: N tokens, H features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from hybridrl.algorithms.linear_statistics import chunks, layer_gradients, rows_at_a_time
from hybridrl.engine.logit_change import LogitChange
from hybridrl.engine.logits_functions import LogitsFunction


class Hidden(NamedTuple):
    """Inputs from which the output layer computes logits.

    Attributes:
        states: `[N, H]`, the same on each rank that shares the vocabulary.
        weight: this rank's rows of the output layer, `[V, H]` if it has all of them.
        bias: `[V]`, if the layer has one.
        change: what the model does to the output of the layer; None: nothing.
    """

    states: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    change: LogitChange | None = None

    def changed(self, logits: torch.Tensor) -> torch.Tensor:
        """The model's logits from those of its output layer."""
        return logits if self.change is None else self.change(logits)


class OwnVocabulary:
    """A rank with the whole output layer. Where ranks share it, a subclass exchanges their logits."""

    def own(self, tensor: torch.Tensor, chunk: slice) -> torch.Tensor:
        """The tokens of a chunk of `[N, ...]` whose logits this rank has as a whole."""
        return tensor[chunk]

    def logits(self, hidden: Hidden, chunk: slice) -> torch.Tensor:
        """The whole output of the layer for this rank's tokens of a chunk, `[n, V]`."""
        return linear(hidden.states[chunk], hidden.weight, hidden.bias)

    def by_words(self, of_tokens: torch.Tensor, tokens: int, rows: int) -> torch.Tensor:
        """Exchange `[n, V]` of each rank's tokens of a chunk for `[tokens, rows]` of this rank's words."""
        return of_tokens

    def everywhere(self, own: torch.Tensor, tokens: int) -> torch.Tensor:
        """The tokens of all ranks."""
        return own

    def summed(self, gradient: torch.Tensor) -> None:
        """Add up a gradient over the ranks, in place."""


def chunked_function(
    function: LogitsFunction,
    hidden: Hidden,
    inputs: Mapping[str, torch.Tensor],
    temperature: float,
    other: Hidden | None,
    vocabulary: OwnVocabulary | None = None,
    chunk_size: int | None = None,
) -> dict[str, torch.Tensor]:
    """The function's outputs `[N, ...]`, the same on each rank; with gradient for states, weight and bias.

    Args:
        hidden: of the engine's model. The gradient of its states is the whole one on each rank.
        inputs: the function's fields, `[N, ...]`.
        temperature: what the function divides the logits by.
        other: of the engine that it compares with, which splits the vocabulary likewise.
        vocabulary: how ranks share it.
        chunk_size: tokens at a time; by default as many as make an efficient matrix product.
    """
    rows = rows_at_a_time(hidden.states.device.type, len(hidden.weight)) if chunk_size is None else chunk_size
    whole = OwnVocabulary() if vocabulary is None else vocabulary
    pass_ = _Pass(function, dict(inputs), temperature, other, whole, max(1, rows), hidden.change)
    outputs: tuple[torch.Tensor, ...] = _ChunkedFunction.apply(hidden.states, hidden.weight, hidden.bias, pass_)
    return dict(zip(function.outputs, outputs, strict=True))


class _Pass(NamedTuple):
    """A function with all that it reads, apart from the model that is trained."""

    function: LogitsFunction
    inputs: dict[str, torch.Tensor]
    temperature: float
    other: Hidden | None
    vocabulary: OwnVocabulary
    rows: int
    change: LogitChange | None

    def compute(self, logits: torch.Tensor, chunk: slice) -> list[torch.Tensor]:
        """The function's outputs for this rank's tokens of a chunk, from the output of the layer."""
        with torch.no_grad():
            other = None if self.other is None else self.other.changed(self.vocabulary.logits(self.other, chunk))
        logits = logits if self.change is None else self.change(logits)
        inputs = {name: self.vocabulary.own(self.inputs[name], chunk) for name in self.function.fields}
        outputs = self.function(logits, inputs, self.temperature, other)
        return [outputs[name] for name in self.function.outputs]


class _ChunkedFunction(torch.autograd.Function):
    """The function of logits = states W^T + b. The backward pass computes each chunk again, and then, with g the
    gradient of a rank's words:

        d states = sum over ranks of g W          d W = sum over chunks of g^T states          d b = sum of g
    """

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pass_: _Pass
    ) -> tuple[torch.Tensor, ...]:
        parts = []
        for chunk in chunks(len(states), pass_.rows) or [slice(0)]:
            of_chunk = pass_.compute(pass_.vocabulary.logits(Hidden(states, weight, bias), chunk), chunk)
            parts.append([pass_.vocabulary.everywhere(tensor, len(states[chunk])) for tensor in of_chunk])
        outputs = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
        ctx.save_for_backward(states, weight, bias)
        ctx.pass_ = pass_
        ctx.mark_non_differentiable(*(tensor for tensor in outputs if not tensor.is_floating_point()))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias = ctx.saved_tensors
        pass_: _Pass = ctx.pass_

        def of_logits(chunk: slice) -> torch.Tensor:
            logits = pass_.vocabulary.logits(Hidden(states, weight, bias), chunk).detach().requires_grad_()
            with torch.enable_grad():
                outputs = pass_.compute(logits, chunk)
            differentiable = [number for number, output in enumerate(outputs) if output.requires_grad]
            own = [pass_.vocabulary.own(gradients[number], chunk) for number in differentiable]
            (of_tokens,) = torch.autograd.grad([outputs[number] for number in differentiable], logits, own)
            return pass_.vocabulary.by_words(of_tokens, len(states[chunk]), len(weight))

        d_states, d_weight, d_bias = layer_gradients(
            states, weight, bias, ctx.needs_input_grad[:3], pass_.rows, of_logits
        )
        if d_states is not None:
            pass_.vocabulary.summed(d_states)
        return d_states, d_weight, d_bias, None
