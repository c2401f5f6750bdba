"""Functions of whole logits (`LogitsFunction`) where ranks share the vocabulary, a chunk of tokens at a time.

A function may read any words of a token, so a token's logits have to be in one place. Of a chunk of n tokens every rank
has `[n, V / ranks]`; they exchange them, so that each has `[n / ranks, V]`, which are as many. No rank holds more.

Legend: N tokens, H features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import linear, pad

from hybridrl.algorithms.linear_statistics import chunks, layer_gradients, rows_at_a_time
from hybridrl.engine.logits_functions import LogitsFunction
from hybridrl.engine.megatron.vocabulary import Part


class Hidden(NamedTuple):
    """What the output layer computes logits from.

    Attributes:
        states: `[N, H]`, the same on each rank that shares the vocabulary.
        weight: this rank's rows of the output layer, `[padded vocabulary / ranks, H]`.
    """

    states: torch.Tensor
    weight: torch.Tensor


def parallel_function(
    function: LogitsFunction,
    hidden: Hidden,
    inputs: Mapping[str, torch.Tensor],
    temperature: float,
    other: Hidden | None,
    part: Part,
    chunk_size: int | None = None,
) -> dict[str, torch.Tensor]:
    """The function's outputs `[N, ...]`, the same on each rank; with gradient for states and weight.

    Args:
        hidden: of the engine's model. The gradient of its states is the whole one on each rank.
        inputs: the function's fields, `[N, ...]`.
        temperature: what the function divides the logits by.
        other: of the engine that it compares with, which splits the vocabulary likewise.
        chunk_size: tokens at a time; by default as many as make an efficient matrix product.
    """
    rows = rows_at_a_time(hidden.states.device.type, len(hidden.weight)) if chunk_size is None else chunk_size
    pass_ = _Pass(function, dict(inputs), temperature, other, part, max(1, rows))
    found: tuple[torch.Tensor, ...] = _ParallelFunction.apply(*hidden, pass_)
    return dict(zip(function.outputs, found, strict=True))


class _Pass(NamedTuple):
    """A function with all that it reads, apart from the model that is trained."""

    function: LogitsFunction
    inputs: dict[str, torch.Tensor]
    temperature: float
    other: Hidden | None
    part: Part
    rows: int

    def share(self, tokens: int) -> int:
        """How many of a chunk's tokens a rank gets; those of the last ranks are padding if they do not divide."""
        return -(-tokens // self.part.group.size())

    def own(self, tensor: torch.Tensor, chunk: slice) -> torch.Tensor:
        """This rank's tokens of a chunk of `[N, ...]`, padded with zeros."""
        share = self.share(len(tensor[chunk]))
        found = tensor[chunk][share * self.part.group.rank() :][:share]
        return torch.cat([found, found.new_zeros(share - len(found), *found.shape[1:])])

    def logits(self, hidden: Hidden, chunk: slice) -> torch.Tensor:
        """The whole logits of this rank's tokens of a chunk, `[share, V]`."""
        ranks, words, padded = self.part.group.size(), self.part.vocabulary, len(hidden.weight)
        of_words = linear(hidden.states[chunk], hidden.weight)
        if ranks == 1:
            return of_words[:, :words]
        share = self.share(len(of_words))
        of_words = pad(of_words, (0, 0, 0, share * ranks - len(of_words)))
        of_tokens = torch.empty_like(of_words)
        dist.all_to_all_single(of_tokens, of_words, group=self.part.group)
        return of_tokens.view(ranks, share, padded).transpose(0, 1).reshape(share, ranks * padded)[:, :words]

    def by_words(self, of_tokens: torch.Tensor, tokens: int, padded: int) -> torch.Tensor:
        """What each rank has for its tokens of a chunk, `[share, V]`, for this rank's words, `[tokens, padded]`."""
        ranks = self.part.group.size()
        of_tokens = pad(of_tokens, (0, ranks * padded - of_tokens.shape[1]))
        if ranks == 1:
            return of_tokens
        sent = of_tokens.view(len(of_tokens), ranks, padded).transpose(0, 1).contiguous()
        found = torch.empty_like(sent)
        dist.all_to_all_single(found, sent, group=self.part.group)
        return found.view(-1, padded)[:tokens]

    def everywhere(self, own: torch.Tensor, tokens: int) -> torch.Tensor:
        """The tokens of all ranks."""
        if self.part.group.size() == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(self.part.group.size())]
        dist.all_gather(parts, own.contiguous(), group=self.part.group)
        return torch.cat(parts)[:tokens]

    def compute(self, logits: torch.Tensor, chunk: slice) -> list[torch.Tensor]:
        """The function's outputs for this rank's tokens of a chunk."""
        with torch.no_grad():
            other = None if self.other is None else self.logits(self.other, chunk)
        inputs = {name: self.own(self.inputs[name], chunk) for name in self.function.fields}
        found = self.function(logits, inputs, self.temperature, other)
        return [found[name] for name in self.function.outputs]


class _ParallelFunction(torch.autograd.Function):
    """The function of logits = states W^T. The backward pass computes each chunk again, and then, with g the gradient
    of a rank's words:

        d states = sum over ranks of g W          d W = sum over chunks of g^T states
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, one: _Pass) -> tuple[torch.Tensor, ...]:
        parts = []
        for chunk in chunks(len(states), one.rows) or [slice(0)]:
            found = one.compute(one.logits(Hidden(states, weight), chunk), chunk)
            parts.append([one.everywhere(tensor, len(states[chunk])) for tensor in found])
        outputs = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
        ctx.save_for_backward(states, weight)
        ctx.one = one
        ctx.mark_non_differentiable(*(tensor for tensor in outputs if not tensor.is_floating_point()))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        one: _Pass = ctx.one

        def of_logits(chunk: slice) -> torch.Tensor:
            logits = one.logits(Hidden(states, weight), chunk).detach().requires_grad_()
            with torch.enable_grad():
                found = one.compute(logits, chunk)
            kept = [number for number, output in enumerate(found) if output.requires_grad]
            own = [one.own(gradients[number], chunk) for number in kept]
            (of_tokens,) = torch.autograd.grad([found[number] for number in kept], logits, own)
            return one.by_words(of_tokens, len(states[chunk]), len(weight))

        wants = (*ctx.needs_input_grad[:2], False)
        d_states, d_weight, _ = layer_gradients(states, weight, None, wants, one.rows, of_logits)
        if d_states is not None and one.part.group.size() > 1:
            dist.all_reduce(d_states, group=one.part.group)
        return d_states, d_weight, None
