"""Token statistics of a softmax over the outputs of a linear layer, without its whole output.

The logits of a micro-batch, N tokens x V words of the vocabulary, are its largest tensor: 5 GB in bfloat16 for 16,384
tokens and 152,000 words. Here a chunk of tokens passes through the layer at a time, forward and backward.

Legend: N tokens, H features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from hybridrl.algorithms.functional import chunk_statistics, joined, log_softmax_of, statistics_gradient, working_dtype
from hybridrl.errors import AlgorithmError

#: least logits of a chunk: enough tokens for an efficient matrix product. On a CPU in float32 they are the 32 MiB from
#: which glibc maps memory and returns it; buffers just below that size stay in the heap, in pieces, chunk after chunk.
_CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}


class _Options(NamedTuple):
    """What to compute, and for how many tokens at a time."""

    scale: float
    entropy: bool
    sum_pi_squared: bool
    rows: int


class _LinearStatistics(torch.autograd.Function):
    """log p(label), entropy and sum of squared probabilities of softmax(scale * (hidden W^T + b)).

    With g the gradient with respect to the logits of a chunk, which the backward pass computes again:

        d hidden = g W          d W = sum over chunks of g^T hidden          d b = sum over chunks of g
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor | None, options: _Options
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        found: list[tuple[Tensor | None, ...]] = []
        for part in chunks(hidden.shape[0], options.rows):
            log_p = log_softmax_of(linear(hidden[part], weight, bias), options.scale)
            y = None if labels is None else labels[part]
            found.append(chunk_statistics(log_p, y, options.entropy, options.sum_pi_squared))
            del log_p  # before the next chunk is allocated
        lp, entropy, square = (joined(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, bias, labels, entropy)
        ctx.options = options
        if square is not None:
            ctx.mark_non_differentiable(square)
        return lp, entropy, square

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, entropy = ctx.saved_tensors
        options: _Options = ctx.options
        g_lp, g_entropy = (grads[0] if labels is not None else None), (grads[1] if entropy is not None else None)

        def of_logits(part: slice) -> Tensor:
            y, g, h, gh = (None if x is None else x[part] for x in (labels, g_lp, entropy, g_entropy))
            log_p = log_softmax_of(linear(hidden[part], weight, bias), options.scale)
            return statistics_gradient(log_p, y, h, g, gh).mul_(options.scale)

        wants = ctx.needs_input_grad[:3]
        return (*layer_gradients(hidden, weight, bias, wants, options.rows, of_logits), None, None)


def layer_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wants: tuple[bool, ...],
    rows: int,
    of_logits: Callable[[slice], Tensor],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden [N, H], weight [V, H] and bias [V], from those of the logits, a chunk of tokens at a time.

    Args:
        wants: whether each of the three is needed; None is returned for the others.
        rows: tokens of a chunk.
        of_logits: computes the gradient of the logits of some tokens, [n, V]. It may leave out the last words, which
            then have no gradient.
    """
    wants_hidden, wants_weight, wants_bias = wants
    # Sums over chunks are in float32; in bfloat16 each addition would round.
    d_hidden = torch.empty_like(hidden) if wants_hidden else None
    d_weight = torch.zeros_like(weight, dtype=working_dtype(weight.dtype)) if wants_weight else None
    d_bias = torch.zeros_like(bias, dtype=working_dtype(bias.dtype)) if bias is not None and wants_bias else None
    for part in chunks(hidden.shape[0], rows):
        step = of_logits(part)
        words = slice(step.shape[1])
        if d_bias is not None:
            d_bias[words] += step.sum(0)
        step = step.to(weight.dtype)
        if d_hidden is not None:
            torch.mm(step, weight[words], out=d_hidden[part])
        if d_weight is not None:
            if d_weight.dtype == weight.dtype:
                d_weight[words].addmm_(step.t(), hidden[part])
            else:
                d_weight[words] += step.t() @ hidden[part]
        del step  # before the next chunk is allocated
    return (
        d_hidden,
        None if d_weight is None else d_weight.to(weight.dtype),
        None if d_bias is None or bias is None else d_bias.to(bias.dtype),
    )


def chunks(tokens: int, rows: int) -> list[slice]:
    """Slices of at most `rows` tokens each, which together are all tokens."""
    return [slice(start, start + rows) for start in range(0, tokens, rows)]


def rows_at_a_time(device_type: str, vocabulary: int) -> int:
    """Number of tokens that pass through the layer at a time on this kind of device."""
    return -(-_CHUNK_ELEMENTS.get(device_type, 1 << 24) // vocabulary)


def linear_token_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    labels: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    chunk_size: int | None = None,
) -> dict[str, Tensor]:
    """Compute what `token_statistics` computes from logits = hidden W^T + b, which never exist as a whole.

    Args:
        hidden: [N, H].
        weight: [V, H].
        bias: [V].
        labels: [N] token ids, to get `log_probs`.
        temperature: of the sampler.
        entropy: also return `entropy`, differentiable.
        sum_pi_squared: also return `sum_pi_squared`, without gradient.
        chunk_size: tokens at a time; by default as many as make an efficient matrix product.

    Returns:
        The requested ones of `log_probs`, `entropy` and `sum_pi_squared`, each [N] in float32.

    Raises:
        AlgorithmError: shapes do not match, or the temperature is not positive.
    """
    if not temperature > 0:
        raise AlgorithmError(f"temperature is {temperature}; the training distribution needs one above 0.")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise AlgorithmError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; they are [N, H] and [V, H]."
        )
    if labels is not None and labels.shape != hidden.shape[:1]:
        raise AlgorithmError(f"labels have shape {tuple(labels.shape)}; {hidden.shape[0]} tokens need one each.")
    if chunk_size is None:
        chunk_size = rows_at_a_time(hidden.device.type, weight.shape[0])
    options = _Options(1.0 / temperature, entropy, sum_pi_squared, max(1, chunk_size))
    if hidden.shape[0] == 0:
        empty = linear(hidden, weight, bias).sum(-1).to(working_dtype(hidden.dtype))
        found: tuple[Tensor | None, ...] = (empty, empty, empty)
    else:
        found = _LinearStatistics.apply(hidden, weight, bias, labels, options)
    wanted = {"log_probs": labels is not None, "entropy": entropy, "sum_pi_squared": sum_pi_squared}
    return {
        name: value for (name, want), value in zip(wanted.items(), found, strict=True) if want and value is not None
    }
