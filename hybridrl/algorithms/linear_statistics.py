"""Token statistics of a softmax over the outputs of a linear layer, without its whole output.

The logits of a micro-batch, N tokens x V words of the vocabulary, are its largest tensor: 5 GB in bfloat16 for 16,384
tokens and 152,000 words. Here a tile of n tokens and v words exists at a time, forward and backward.

Legend: N tokens, H features, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from hybridrl.algorithms.functional import LOWEST_LOG_P, joined, kernels_for, tile_gradient, working_dtype
from hybridrl.errors import AlgorithmError

#: least logits of a chunk: enough tokens for an efficient matrix product. On a CPU in float32 they are the 32 MiB from
#: which glibc maps memory and returns it; buffers just below that size stay in the heap, in pieces, chunk after chunk.
CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}
#: both sides of a tile are a multiple of it, unless they are smaller
_SIDE = 128


class _Options(NamedTuple):
    """The statistics to compute, and the tokens per chunk.

    With a cap, the logits z of the layer become cap tanh(multiplier z / cap) before they are scaled.
    """

    scale: float
    entropy: bool
    sum_pi_squared: bool
    rows: int
    multiplier: float = 1.0
    cap: float | None = None


class _LinearStatistics(torch.autograd.Function):
    """log p(label), entropy and sum of squared probabilities of softmax(scale * (hidden W^T + b)).

    With g the gradient with respect to the logits of a tile, which the backward pass computes again:

        d hidden = sum over tiles of g W      d W = sum over tiles of g^T hidden      d b = sum over tiles of g
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor | None, options: _Options
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        elements, memory = options.rows * weight.shape[0], _TileMemory()
        chunks: list[tuple[Tensor | None, ...]] = []
        for part, tiles in tiles_of(hidden.shape[0], weight.shape[0], elements):
            y = None if labels is None else labels[part]
            of_tiles = []
            for words in tiles:
                logits = _tile_logits(hidden[part], weight[words], None if bias is None else bias[words], memory)
                logits = _capped(logits, options, memory)
                of_tiles.append(_tile_statistics(logits, None if y is None else y - words.start, options, memory))
                del logits  # before the next tile is allocated
            chunks.append(_of_all_words(of_tiles))
        lp, entropy, square, normalizers = (joined(parts) for parts in zip(*chunks, strict=True))
        ctx.save_for_backward(hidden, weight, bias, labels, entropy, normalizers)
        ctx.options = options
        if square is not None:
            ctx.mark_non_differentiable(square)
        return lp, entropy, square

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, entropy, normalizer = ctx.saved_tensors
        options: _Options = ctx.options
        g_lp, g_entropy = (grads[0] if labels is not None else None), (grads[1] if entropy is not None else None)

        memory = _TileMemory()

        def of_tile(part: slice, words: slice) -> Tensor:
            logits = _tile_logits(hidden[part], weight[words], None if bias is None else bias[words], memory)
            if options.cap is None:
                return of_logits(logits, part, words)
            logits = _capped(logits, options, memory)
            slope = torch.mul(
                logits, 1 / options.cap, out=memory.of("slopes", logits.shape, logits.device, logits.dtype)
            )
            slope.square_().neg_().add_(1.0).mul_(options.multiplier)  # of the cap: 1 - tanh^2
            return of_logits(logits, part, words).mul_(slope)

        def of_logits(logits: Tensor, part: slice, words: slice) -> Tensor:
            y, g, h, gh = (None if x is None else x[part] for x in (labels, g_lp, entropy, g_entropy))
            near = None if y is None else y - words.start
            if (kernels := kernels_for(logits)) is not None:
                grad_logits: Tensor = kernels.gradient(logits, near, options.scale, normalizer[part], h, g, gh, logits)
                return grad_logits
            log_p = _scaled(logits, options.scale, memory).sub_(normalizer[part].unsqueeze(-1))
            step = tile_gradient(log_p, near, h, g, gh, memory.like(log_p))
            return step if options.scale == 1.0 else step.mul_(options.scale)

        wants = ctx.needs_input_grad[:3]
        elements = options.rows * weight.shape[0]
        return (*tiled_gradients(hidden, weight, bias, wants, elements, of_tile), None, None)


class _TileMemory:
    """Buffers that a CPU reuses for each tile. Fresh memory of this size is mapped page by page when it is first
    written, which takes longer than the softmax of a tile. A GPU's allocator caches memory anyway.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def of(self, name: str, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """Return an uninitialized tile of this shape; None on a GPU, which allocates each. The first is the largest."""
        if device.type != "cpu":
            return None
        size = math.prod(shape)
        if (name, dtype) not in self._buffers:
            self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return self._buffers[name, dtype][:size].view(*shape)

    def like(self, tile: Tensor) -> Tensor | None:
        """A second one like a tile, for its probabilities."""
        return self.of("probabilities", tile.shape, tile.device, tile.dtype)


def _tile_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, memory: _TileMemory) -> Tensor:
    """The logits of some tokens [n, H] for some words [v, H]."""
    out = memory.of("logits", (hidden.shape[0], weight.shape[0]), hidden.device, hidden.dtype)
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias, hidden, weight.t(), out=out)


def _capped(logits: Tensor, options: _Options, memory: _TileMemory) -> Tensor:
    """The logits with the soft cap, in at least float32, if there is one."""
    if options.cap is None:
        return logits
    return _scaled(logits, options.multiplier / options.cap, memory).tanh_().mul_(options.cap)


def _scaled(logits: Tensor, scale: float, memory: _TileMemory) -> Tensor:
    """The logits times `scale`, in at least float32; the memory of float32 logits is used again."""
    dtype = working_dtype(logits.dtype)
    if logits.dtype != dtype:
        out = memory.of("scaled", logits.shape, logits.device, dtype)
        logits = logits.to(dtype) if out is None else out.copy_(logits)
    return logits if scale == 1.0 else logits.mul_(scale)


def _tile_statistics(
    logits: Tensor, labels: Tensor | None, options: _Options, memory: _TileMemory
) -> tuple[Tensor | None, ...]:
    """`chunk_statistics` and the normalizer of the softmax over some words, whose logits [n, v] may be overwritten.

    With m = max z and e_j = exp(z_j - m), of the scaled logits z:

        normalizer = m + log sum e      H = log sum e - sum e_j (z_j - m) / sum e      sum p^2 = sum e^2 / (sum e)^2

    Args:
        labels: [n], as places among these words; the log-probability of one of other words is -inf.
    """
    near = None if labels is None else labels.clamp(0, logits.shape[-1] - 1)
    lp = entropy = square = None
    if (kernels := kernels_for(logits)) is not None:
        lp, entropy, square, normalizer = kernels.statistics(
            logits, near, options.scale, options.entropy, options.sum_pi_squared
        )
    else:
        logits = _scaled(logits, options.scale, memory)
        largest = logits.amax(-1, keepdim=True)
        largest.masked_fill_(largest == -torch.inf, 0.0)  # of excluded words alone
        e = torch.exp(logits.sub_(largest), out=memory.like(logits))
        total = e.sum(-1)
        log_total = total.log()
        normalizer = largest.squeeze(-1) + log_total
        if near is not None:
            lp = logits.gather(-1, near.unsqueeze(-1)).squeeze(-1) - log_total
        if options.sum_pi_squared:
            square = e.square().sum(-1) / total.square()
        if options.entropy:
            # A word excluded by a logit of -inf has e = 0 and contributes nothing; 0 * -inf would be NaN.
            entropy = log_total - e.mul_(logits.clamp_(min=LOWEST_LOG_P)).sum(-1) / total
    if lp is not None and near is not None and labels is not None:
        lp = lp.masked_fill(near != labels, -torch.inf)
    return lp, entropy, square, normalizer


def _of_all_words(tiles: list[tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    """The statistics over all words from those over the words of each tile t, with w_t = sum of the tile's p.

    log p = log p_t + log w_t        H = sum_t w_t (H_t - log w_t)        sum p^2 = sum_t w_t^2 sum p_t^2
    """
    if len(tiles) == 1:
        return tiles[0]
    lp, entropy, square, normalizers = (
        None if parts[0] is None else torch.stack(parts) for parts in zip(*tiles, strict=True)
    )
    assert normalizers is not None
    normalizer = torch.logsumexp(normalizers, 0)
    log_w = normalizers - normalizer
    w = log_w.exp()

    # A tile of excluded words has no p of its own, so its statistics are NaN and count nothing. Other NaN stays.
    def summed(weight: Tensor, values: Tensor) -> Tensor:
        return torch.where(w == 0, 0, weight * values).sum(0)

    return (
        None if lp is None else (lp.masked_fill(normalizers == -torch.inf, -torch.inf) + log_w).amax(0),
        None if entropy is None else summed(w, entropy - log_w),
        None if square is None else summed(w * w, square),
        normalizer,
    )


def tiles_of(tokens: int, words: int, elements: int) -> list[tuple[slice, list[slice]]]:
    """Slices of the tokens, each with slices of the words, so that a tile has at most `elements` (or one) elements.

    A matrix product of a tile reads n rows of the hidden states and v rows of the weight, which is least for n = v. Its
    sides are multiples of 128, where they are not smaller: a GPU multiplies matrices whose rows begin at odd addresses
    several times slower.
    """
    rows = _aligned(max(1, min(math.isqrt(elements), tokens)))
    columns = _aligned(max(1, elements // rows))
    return [(part, chunks(words, columns)) for part in chunks(tokens, rows)]


def _aligned(size: int) -> int:
    return size if size < _SIDE else size - size % _SIDE


def tiled_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wants: tuple[bool, ...],
    elements: int,
    of_tile: Callable[[slice, slice], Tensor],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden [N, H], weight [V, H] and bias [V], from those of the logits, a tile [n, v] at a time.

    Args:
        wants: whether each of the three is needed; None is returned for the others.
        elements: most elements of a tile.
        of_tile: computes the gradient of the logits of some tokens for some words.
    """
    wants_hidden, wants_weight, wants_bias = wants
    # Sums over tiles are in float32; in bfloat16 each addition would round.
    d_hidden = _zeros(hidden) if wants_hidden else None
    d_weight = _zeros(weight) if wants_weight else None
    d_bias = _zeros(bias) if bias is not None and wants_bias else None
    for part, tiles in tiles_of(hidden.shape[0], weight.shape[0], elements):
        for words in tiles:
            step = of_tile(part, words)
            if d_bias is not None:
                d_bias[words] += step.sum(0, dtype=d_bias.dtype)
            step = step.to(weight.dtype)
            if d_hidden is not None:
                _add_product(d_hidden[part], step, weight[words])
            if d_weight is not None:
                _add_product(d_weight[words], step.t(), hidden[part])
            del step  # before the next tile is allocated
    return (
        None if d_hidden is None else d_hidden.to(hidden.dtype),
        None if d_weight is None else d_weight.to(weight.dtype),
        None if d_bias is None or bias is None else d_bias.to(bias.dtype),
    )


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=working_dtype(like.dtype))


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """total += first @ second, whose dtype may have fewer bits."""
    if total.dtype == second.dtype:
        total.addmm_(first, second)
    else:
        total += first @ second


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


def rows_at_a_time(device_type: str, vocabulary: int, most: int | None = None) -> int:
    """Number of tokens that pass through the layer at a time on this kind of device, at most `most`."""
    fast = -(-CHUNK_ELEMENTS.get(device_type, 1 << 24) // vocabulary)
    return fast if most is None else min(fast, most)


def linear_token_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    labels: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    chunk_size: int | None = None,
    multiplier: float = 1.0,
    soft_cap: float | None = None,
) -> dict[str, Tensor]:
    """Compute what `token_statistics` computes from logits = hidden W^T + b, which never exist as a whole.

    Some models change the output z of their last layer: to multiplier z, or to cap tanh(multiplier z / cap).

    Args:
        hidden: [N, H].
        weight: [V, H].
        bias: [V].
        labels: [N] token ids, to get `log_probs`.
        temperature: of the sampler.
        entropy: also return `entropy`, differentiable.
        sum_pi_squared: also return `sum_pi_squared`, without gradient.
        chunk_size: a tile has at most as many elements as this many tokens have logits; by default as many as make an
            efficient matrix product.
        multiplier: of the logits, above 0.
        soft_cap: cap, above 0; None: none.

    Returns:
        The requested ones of `log_probs`, `entropy` and `sum_pi_squared`, each [N] in float32.

    Raises:
        AlgorithmError: shapes do not match, or the temperature, the multiplier or the cap is not positive.
    """
    if not temperature > 0:
        raise AlgorithmError(f"temperature is {temperature}; the training distribution needs one above 0.")
    if not multiplier > 0 or not (soft_cap is None or soft_cap > 0):
        raise AlgorithmError(f"multiplier is {multiplier} and soft_cap {soft_cap}; both need to be above 0.")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise AlgorithmError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; they are [N, H] and [V, H]."
        )
    if labels is not None and labels.shape != hidden.shape[:1]:
        raise AlgorithmError(f"labels have shape {tuple(labels.shape)}; {hidden.shape[0]} tokens need one each.")
    if chunk_size is None:
        chunk_size = rows_at_a_time(hidden.device.type, weight.shape[0])
    scale = 1.0 / temperature if soft_cap is not None else multiplier / temperature
    options = _Options(scale, entropy, sum_pi_squared, max(1, chunk_size), multiplier, soft_cap)
    if hidden.shape[0] == 0:
        empty = linear(hidden, weight, bias).sum(-1).to(working_dtype(hidden.dtype))
        statistics: tuple[Tensor | None, ...] = (empty, empty, empty)
    else:
        statistics = _LinearStatistics.apply(hidden, weight, bias, labels, options)
    requested = {"log_probs": labels is not None, "entropy": entropy, "sum_pi_squared": sum_pi_squared}
    return {
        name: value
        for (name, want), value in zip(requested.items(), statistics, strict=True)
        if want and value is not None
    }
