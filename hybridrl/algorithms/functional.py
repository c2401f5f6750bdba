"""Masked statistics and the token log-probabilities and entropies of a softmax.

Legend: B sequences, T response tokens, V vocabulary, N = all leading dimensions together.

Masks may be bool, integer or float; a token counts where its mask is not zero. Values under a zero mask are never
multiplied in, so NaN or inf there spreads neither to the value nor to the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.errors import AlgorithmError
from hybridrl.utils import device

EPS = 1e-8
# exp of it is exactly 0 in float64 too, so it can replace a log-probability of -inf in products with the probability.
LOWEST_LOG_P = -1e4
# Elements per float32 working buffer of a softmax pass: small enough for a CPU's cache, large enough to fill a GPU.
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
# Elements per block of rows in masked statistics, so that temporaries stay in a CPU's cache.
_BLOCK_ELEMENTS = 1 << 17
# Below this many elements the log-probabilities are kept for the backward pass instead of being computed again.
_SMALL = 1 << 21


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` where the mask is set and exactly zero elsewhere, even where they are NaN."""
    return torch.where(mask.bool(), values, 0.0)


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum of the values whose mask is set, over `axis` (all axes by default)."""
    masked = keep(values, mask)
    return masked.sum() if axis is None else masked.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean of the values whose mask is set: sum(x m) / (sum m + 1e-8), so 0 where nothing is set."""
    count = mask.bool().sum() if axis is None else mask.bool().sum(dim=axis)
    return masked_sum(values, mask, axis) / (count + EPS)


def row_blocks(values: Tensor) -> list[slice]:
    """Slices of rows of `values [B, ...]` whose temporaries fit a CPU's cache; one slice elsewhere, or without rows.

    A chain of elementwise operations over a large array is bound by memory and by the page faults of new temporaries.
    Processed in blocks, the temporaries stay in the cache and are reused.
    """
    rows = len(values)
    width = max(values[0].numel(), 1) if rows else 1
    step = max(1, _BLOCK_ELEMENTS // width) if values.device.type == "cpu" else max(rows, 1)
    return [slice(start, start + step) for start in range(0, rows, step)] or [slice(0, 0)]


def masked_row_sum(values: Tensor, mask: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum of each row's masked values, [B, T] -> [B], in `dtype`; None: in that of the values."""
    if not len(values):
        return values.sum(-1, dtype=dtype)
    return torch.cat([keep(values[block], mask[block]).sum(-1, dtype=dtype) for block in row_blocks(values)])


def rounding_of(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest difference that rounding alone makes between numbers that are equal, 2 eps |x|, in float64.

    eps is that of `dtype`, the distance from 1 to the next number. |x|, at least the smallest normal number, is the
    magnitude of the numbers, or of the terms that they are the sum of. Each number is rounded by at most eps |x| / 2
    when it is stored; the rest of the bound is for what computed it.

    Args:
        magnitude: |x|, of any shape.
        dtype: in which the numbers, or the terms, are stored.
    """
    kind = torch.finfo(dtype)
    return 2.0 * kind.eps * magnitude.double().abs().clamp(min=kind.smallest_normal)


def without_rounding(differences: Tensor, rounding: float | Tensor) -> Tensor:
    """The differences, 0 where they are at most `rounding` (see `rounding_of`)."""
    return torch.where(differences.abs() <= rounding, 0.0, differences)


def _moments(values: Tensor, mask: Tensor, rounding: float | Tensor | None = None) -> tuple[int, Tensor, Tensor]:
    """(count, mean, sum of squared distances from the mean) of the masked values, 0-dim in float64, in two passes.

    The squares are exactly 0 where the largest and the smallest value differ by at most `rounding` (None: by what
    `rounding_of` says of the values).
    """
    blocks = row_blocks(values)
    count = int(torch.count_nonzero(mask))
    zero = torch.zeros((), dtype=torch.float64, device=values.device)
    if not count:
        return count, zero, zero
    set_ = mask.bool()
    lowest = torch.stack([torch.where(set_[b], values[b], torch.inf).amin() for b in blocks]).amin().double()
    largest = torch.stack([torch.where(set_[b], values[b], -torch.inf).amax() for b in blocks]).amax().double()
    # Distances from one of the values: the mean of equal values is then exactly that value.
    mean = lowest + sum((keep(values[b].double() - lowest, set_[b]).sum() for b in blocks), start=zero) / count
    squares = sum((keep(values[b].double() - mean, set_[b]).square().sum() for b in blocks), start=zero)
    if rounding is None:
        rounding = rounding_of(torch.maximum(lowest.abs(), largest.abs()), values.dtype)
    return count, mean, torch.where(largest - lowest <= rounding, 0.0, squares)


def _variance(count: int, squares: Tensor, unbiased: bool) -> Tensor:
    if count == 0:
        raise AlgorithmError("variance over an empty mask: no token of the batch is a response token.")
    if unbiased and count == 1:
        raise AlgorithmError("unbiased variance of one token is undefined: the batch has a single response token.")
    return squares / (count - 1 if unbiased else count)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True, rounding: float | Tensor | None = None) -> Tensor:
    """Variance of the values whose mask is set; with Bessel's correction n / (n - 1) if `unbiased`.

    Values that differ by at most `rounding` (None: `rounding_of` them) have variance 0.

    Raises:
        AlgorithmError: no value is set, or only one value is set and `unbiased` would divide by zero.
    """
    count, _, squares = _moments(values, mask, rounding)
    return _variance(count, squares, unbiased).to(values.dtype)


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, rounding: float | Tensor | None = None
) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the masked values, zero elsewhere; var is the unbiased one.

    With `shift_mean=False` the mean is added back, so that only the scale changes. Values that differ only by rounding
    become equal: 0, or their mean.

    Args:
        values, mask: of one shape.
        shift_mean: whether the mean becomes 0.
        rounding: the largest difference between values that is rounding; None: `rounding_of` the values. Differences of
            larger numbers have the rounding of those.

    Raises:
        AlgorithmError: fewer than two values are set.
    """
    mask = mask.bool()
    count, mean, squares = _moments(values, mask, rounding)
    variance = _variance(count, squares, unbiased=True)
    scale = torch.where(variance == 0, 0.0, torch.rsqrt(variance + EPS))
    offset = 0.0 if shift_mean else mean
    return torch.cat(
        [keep(((values[b].double() - mean) * scale + offset).to(values.dtype), mask[b]) for b in row_blocks(values)]
    )


def _chunk_rows(logits: Tensor, chunk_size: int | None) -> int:
    """Number of rows of the flattened `logits [N, V]` that are processed at a time."""
    if chunk_size is not None:
        if chunk_size < 1:
            raise AlgorithmError(f"chunk_size is {chunk_size}; it must be a positive number of tokens.")
        return chunk_size
    vocabulary = logits.shape[-1]
    return rows_at_a_time(logits.device.type, logits.numel() // vocabulary, vocabulary)


def rows_at_a_time(device_type: str, rows: int, vocabulary: int, most: int | None = None) -> int:
    """Number of rows of logits `[rows, V]` that `token_statistics` processes at a time on this kind of device.

    Args:
        most: a limit of it; None for none.
    """
    fast = rows if rows * vocabulary <= _SMALL else CHUNK_ELEMENTS.get(device_type, 1 << 24) // vocabulary
    return max(1, fast if most is None else min(fast, most))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which softmax statistics are computed for logits of `dtype`: float64 for float64, else float32."""
    return dtype if dtype == torch.float64 else torch.float32


def kernels_for(logits: Tensor) -> ModuleType | None:
    """`hybridrl.algorithms.softmax_kernels`, where it can compute on these logits `[N, V]`; else None."""
    if not logits.is_cuda or logits.dtype == torch.float64 or logits.stride(-1) != 1 or not device.runs_triton():
        return None
    from hybridrl.algorithms import softmax_kernels

    return softmax_kernels


def log_softmax_of(x: Tensor, scale: float) -> Tensor:
    """Log softmax of `x * scale` in at least float32; scaling by 1 is skipped."""
    if scale != 1.0:
        x = x.to(working_dtype(x.dtype)) * scale
    return torch.log_softmax(x, dim=-1, dtype=working_dtype(x.dtype))


class _Options(NamedTuple):
    """The statistics to compute, the rows per chunk, and whether the backward pass may overwrite the logits."""

    entropy: bool
    sum_pi_squared: bool
    rows: int
    inplace_backward: bool


def _entropy_gradient(
    logp: Tensor,
    entropy: Tensor,
    g_entropy: Tensor,
    labels: Tensor | None,
    g_lp: Tensor | None,
    buffer: Tensor | None = None,
) -> Tensor:
    """Gradient of sum(g_H H + g_lp lp) with respect to the scaled logits, [n, V]; `logp` is overwritten."""
    p = torch.exp(logp, out=buffer)
    # -p (g_lp + g_H (log p + H)), where log p is kept finite if p is zero.
    step = logp.clamp_(min=LOWEST_LOG_P).add_(entropy.unsqueeze(-1)).mul_(g_entropy.unsqueeze(-1))
    if g_lp is not None:
        step.add_(g_lp.unsqueeze(-1))
    step.mul_(p).neg_()
    if g_lp is not None and labels is not None:
        step.scatter_add_(-1, labels.unsqueeze(-1), g_lp.unsqueeze(-1).to(step.dtype))
    return step


def _log_prob_gradient(p: Tensor, labels: Tensor, g_lp: Tensor) -> Tensor:
    """g_lp ([j = y] - p), written into the memory of p [n, V]."""
    return p.mul_(-g_lp.unsqueeze(-1)).scatter_add_(-1, labels.unsqueeze(-1), g_lp.unsqueeze(-1).to(p.dtype))


def chunk_statistics(
    logp: Tensor, labels: Tensor | None, entropy: bool, sum_pi_squared: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """log p(label), entropy and sum of squared probabilities, [n] each, of log p [n, V], which may be overwritten."""
    lp = None if labels is None else logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropies = square = None
    if entropy or sum_pi_squared:
        p = logp.exp()
        if sum_pi_squared:
            square = (p * p).sum(-1)
        if entropy:
            # A token excluded by a logit of -inf has p = 0 and contributes nothing; 0 * -inf would be NaN.
            entropies = -p.mul_(logp.clamp_(min=LOWEST_LOG_P)).sum(-1)
    return lp, entropies, square


def statistics_gradient(
    logp: Tensor, labels: Tensor | None, entropy: Tensor | None, g_lp: Tensor | None, g_entropy: Tensor | None
) -> Tensor:
    """Gradient with respect to the scaled logits, [n, V], from those of the statistics; `logp` is overwritten."""
    if g_entropy is not None and entropy is not None:
        return _entropy_gradient(logp, entropy, g_entropy, labels, g_lp)
    if g_lp is None or labels is None:
        return logp.zero_()
    return _log_prob_gradient(logp.exp_(), labels, g_lp)


def tile_gradient(
    logp: Tensor,
    labels: Tensor | None,
    entropy: Tensor | None,
    g_lp: Tensor | None,
    g_entropy: Tensor | None,
    buffer: Tensor | None = None,
) -> Tensor:
    """Compute `statistics_gradient` for a part of the vocabulary; overwrites `logp` [n, v].

    Args:
        labels: [n], as places among these words; below 0 or from v on for those of other words.
        buffer: [n, v], for the probabilities; None allocates it.
    """
    if g_entropy is not None and entropy is not None:
        step = _entropy_gradient(logp, entropy, g_entropy, None, g_lp, buffer)
    elif g_lp is None:
        return logp.zero_()
    else:
        step = logp.exp_().mul_(-g_lp.unsqueeze(-1))
    if g_lp is not None and labels is not None:
        here = (labels >= 0) & (labels < logp.shape[-1])
        of_label = torch.where(here, g_lp, 0).to(step.dtype)
        step.scatter_add_(-1, labels.clamp(0, logp.shape[-1] - 1).unsqueeze(-1), of_label.unsqueeze(-1))
    return step


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate the chunks of one statistic; None if it was not computed."""
    chunks = [part for part in parts if part is not None]
    return (torch.cat(chunks) if len(chunks) > 1 else chunks[0]) if chunks else None


class _TokenStatistics(torch.autograd.Function):
    """log p(label), entropy and sum of squared probabilities of softmax(logits * scale), a chunk of tokens at a time.

    With z = scale * logits, lp = z_y - logsumexp z, p = softmax z, H = -sum_j p_j log p_j:

        d lp / d z_j = [j = y] - p_j          d H / d z_j = -p_j (log p_j + H)

    Only the logits are kept for the backward pass, which recomputes p chunk by chunk and writes the gradient directly
    into one buffer of the logits' dtype. Small inputs keep their log-probabilities instead.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor | None, scale: float, options: _Options
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        n, rows = logits.shape[0], options.rows
        small = rows >= n and logits.numel() <= _SMALL and ctx.needs_input_grad[0]
        chunks: list[tuple[Tensor | None, ...]] = []
        logp = logits
        for start in range(0, n, rows):
            logp = log_softmax_of(logits[start : start + rows], scale)
            y = None if labels is None else labels[start : start + rows]
            chunks.append(chunk_statistics(logp, y, options.entropy, options.sum_pi_squared))
        lp, entropy, square = (joined(parts) for parts in zip(*chunks, strict=True))
        ctx.save_for_backward(logp if small else logits, labels, entropy)
        ctx.scale, ctx.options, ctx.small, ctx.dtype = scale, options, small, logits.dtype
        if square is not None:
            ctx.mark_non_differentiable(square)
        return lp, entropy, square

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, labels, entropy = ctx.saved_tensors
        g_lp, g_entropy = (grads[0] if labels is not None else None), (grads[1] if entropy is not None else None)
        scale, inplace = ctx.scale, ctx.options.inplace_backward and not ctx.small
        source = saved.detach()
        grad = source if inplace else torch.empty_like(source)
        for start in range(0, source.shape[0], ctx.options.rows):
            part = slice(start, start + ctx.options.rows)
            y, g, h, gh = (None if x is None else x[part] for x in (labels, g_lp, entropy, g_entropy))
            if ctx.small:
                step = statistics_gradient(source[part].clone(), y, h, g, gh)
            elif gh is not None or g is None or y is None or inplace or source.dtype != working_dtype(source.dtype):
                step = statistics_gradient(log_softmax_of(source[part], scale), y, h, g, gh)
            else:
                # The common case needs no working buffer: the softmax is computed in the gradient's memory.
                x = source[part] if scale == 1.0 else source[part] * scale
                step = _log_prob_gradient(torch.softmax(x, -1, out=grad[part]), y, g)
            if scale != 1.0:
                step.mul_(scale)
            if source.shape[0] <= ctx.options.rows and not inplace:
                return step.to(ctx.dtype), None, None, None
            if step.data_ptr() != grad[part].data_ptr():
                grad[part].copy_(step)
        return grad, None, None, None


class _KernelStatistics(torch.autograd.Function):
    """Compute the same as `_TokenStatistics`, by kernels that read the logits once per direction."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor | None, scale: float, options: _Options, kernels: ModuleType
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        lp, entropy, square, normalizer = kernels.statistics(
            logits, labels, scale, options.entropy, options.sum_pi_squared
        )
        ctx.save_for_backward(logits, labels, entropy, normalizer)
        ctx.scale, ctx.inplace, ctx.kernels = scale, options.inplace_backward, kernels
        if square is not None:
            ctx.mark_non_differentiable(square)
        return lp, entropy, square

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, labels, entropy, normalizer = ctx.saved_tensors
        g_lp, g_entropy = (grads[0] if labels is not None else None), (grads[1] if entropy is not None else None)
        logits = logits.detach()
        out = logits if ctx.inplace else torch.empty_like(logits)
        grad_logits = ctx.kernels.gradient(logits, labels, ctx.scale, normalizer, entropy, g_lp, g_entropy, out)
        return grad_logits, None, None, None, None


def token_statistics(
    logits: Tensor,
    labels: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    chunk_size: int | None = None,
    inplace_backward: bool = False,
) -> dict[str, Tensor]:
    """Compute the statistics of softmax(logits / temperature) that training needs, in one pass over the logits.

    Args:
        logits: [..., V], any float dtype; computation and results are in float32 (float64 for float64 logits).
        labels: [...] int64 token ids, to get `log_probs`.
        temperature: the sampler's temperature; it is applied chunk by chunk, so no scaled copy of the logits exists.
        entropy: also return `entropy` = -sum_v p_v log p_v, differentiable.
        sum_pi_squared: also return `sum_pi_squared` = sum_v p_v^2, without gradient (a weight of the OTB baseline).
        chunk_size: tokens processed at a time; by default as many as fit a small working buffer. The kernels for GPUs
            need no such buffer and compute all at once.
        inplace_backward: let the backward pass overwrite the logits with their gradient. This saves one buffer of
            their size, but is valid only if nothing else reads the logits afterwards.

    Returns:
        The requested ones of `log_probs`, `entropy` and `sum_pi_squared`, each [...].

    Raises:
        AlgorithmError: shapes do not match, or the temperature is not positive.
    """
    if not temperature > 0:
        raise AlgorithmError(f"temperature is {temperature}; the training distribution needs one above 0.")
    if labels is not None and labels.shape != logits.shape[:-1]:
        raise AlgorithmError(
            f"labels have shape {tuple(labels.shape)}; logits of shape {tuple(logits.shape)} need "
            f"{tuple(logits.shape[:-1])}."
        )
    shape = logits.shape[:-1]
    flat = logits.reshape(-1, logits.shape[-1])
    if flat.shape[0] == 0:
        empty = flat.sum(-1).to(working_dtype(logits.dtype)).reshape(shape)
        statistics: list[Tensor | None] = [empty, empty, empty]
    else:
        flat_labels = None if labels is None else labels.reshape(-1)
        options = _Options(entropy, sum_pi_squared, _chunk_rows(logits, chunk_size), inplace_backward)
        if (kernels := kernels_for(flat)) is not None:
            statistics = list(_KernelStatistics.apply(flat, flat_labels, 1.0 / temperature, options, kernels))
        else:
            statistics = list(_TokenStatistics.apply(flat, flat_labels, 1.0 / temperature, options))
    requested = {"log_probs": labels is not None, "entropy": entropy, "sum_pi_squared": sum_pi_squared}
    return {
        name: value.reshape(shape)
        for (name, want), value in zip(requested.items(), statistics, strict=True)
        if want and value is not None
    }


class _FullKL(torch.autograd.Function):
    """sum_v p_v (log p_v - log q_v) of p = softmax(scale * z) and q, a chunk of tokens at a time.

        d KL / d z_j = scale p_j (log p_j - log q_j - KL)

    The backward pass keeps both logits and nothing else of their size.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ref_logits: Tensor, scale: float, rows: int) -> Tensor:
        parts = []
        for start in range(0, logits.shape[0], rows):
            p, difference = _p_and_log_ratio(logits[start : start + rows], ref_logits[start : start + rows], scale)
            parts.append(p.mul_(difference).sum(-1))
        kl = torch.cat(parts)
        ctx.save_for_backward(logits, ref_logits, kl)
        ctx.scale, ctx.rows = scale, rows
        return kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, ref_logits, kl = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for start in range(0, logits.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            p, difference = _p_and_log_ratio(logits[part], ref_logits[part], ctx.scale)
            weight = (grad[part] * ctx.scale).unsqueeze(-1)
            grad_logits[part] = difference.sub_(kl[part].unsqueeze(-1)).mul_(p).mul_(weight)
        return grad_logits, None, None, None


def _p_and_log_ratio(logits: Tensor, ref_logits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """p and log p - log q, [n, V]; the latter is 0 where p is 0, since such terms do not contribute to the sum."""
    log_p, log_q = log_softmax_of(logits, scale), log_softmax_of(ref_logits, scale)
    return log_p.exp(), torch.where(log_p == -torch.inf, 0.0, log_p - log_q)


def full_kl_from_logits(
    logits: Tensor, ref_logits: Tensor, *, temperature: float = 1.0, chunk_size: int | None = None
) -> Tensor:
    """KL(pi || pi_ref) over the vocabulary, sum_v pi_v (log pi_v - log pi_ref_v), exact, with its exact gradient.

    Args:
        logits, ref_logits: [..., V], any float dtype; the computation is in float32 (float64 for float64 logits).
            `ref_logits` receives no gradient.
        temperature: both distributions are softmax(logits / temperature).

    Returns:
        [...].
    """
    if logits.shape != ref_logits.shape:
        raise AlgorithmError(
            f"logits have shape {tuple(logits.shape)} and the reference's {tuple(ref_logits.shape)}; the two policies "
            "need one vocabulary."
        )
    flat, other = (x.reshape(-1, x.shape[-1]) for x in (logits, ref_logits))
    if not len(flat):
        return flat.sum(-1).to(working_dtype(logits.dtype)).reshape(logits.shape[:-1])
    kl: Tensor = _FullKL.apply(flat, other, 1.0 / temperature, _chunk_rows(flat, chunk_size))
    return kl.reshape(logits.shape[:-1])


def logprobs_from_logits(
    logits: Tensor,
    labels: Tensor,
    inplace_backward: bool = False,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    """log softmax(logits / temperature)[label]: [..., V] and [...] -> [...] in float32.

    See `token_statistics`. `inplace_backward` overwrites the logits in the backward pass and is off by default.
    """
    return token_statistics(logits, labels, temperature, chunk_size=chunk_size, inplace_backward=inplace_backward)[
        "log_probs"
    ]


def entropy_from_logits(logits: Tensor, *, temperature: float = 1.0, chunk_size: int | None = None) -> Tensor:
    """-sum_v p_v log p_v with p = softmax(logits / temperature): [..., V] -> [...] in float32, differentiable."""
    return token_statistics(logits, None, temperature, entropy=True, chunk_size=chunk_size)["entropy"]


def sum_pi_squared_from_logits(logits: Tensor, *, temperature: float = 1.0, chunk_size: int | None = None) -> Tensor:
    """sum_v p_v^2 with p = softmax(logits / temperature): [..., V] -> [...] in float32, without gradient."""
    return token_statistics(logits, None, temperature, sum_pi_squared=True, chunk_size=chunk_size)["sum_pi_squared"]
