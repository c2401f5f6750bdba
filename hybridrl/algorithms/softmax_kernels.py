"""Triton kernels for the statistics of a softmax and their gradient: each reads the logits once, in their own dtype.

Legend: N tokens, V vocabulary, z = scale * logits, p = softmax z. Sums are in float32.

PyTorch's operations convert a chunk of logits to float32 and pass over it some ten times per direction, which took a
third of an update of a model with 0.5 B parameters and 152,000 words on a GPU. `hybridrl.algorithms.functional` uses
these kernels for logits on a GPU, and its own operations elsewhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: words that a program of the GPU reads at a time
BLOCK = 8192
_WARPS = 16


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]  # Triton reads the annotations of a kernel
    logits,
    labels,
    normalizers,
    log_probs,
    entropies,
    squares,
    scale,
    stride,
    words,
    HAS_LABELS: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of one token, with m = max z of the words so far, s = sum exp(z - m), t = sum exp(z - m) (z - m) and
    q = sum exp(2 (z - m)):

    log sum exp z = m + log s        H = log s - t / s        sum p^2 = q / s^2
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    m = -float("inf")
    s = 0.0
    t = 0.0
    q = 0.0
    for start in range(0, words, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(logits + columns, mask=columns < words, other=-float("inf")).to(tl.float32) * scale
        largest = tl.maximum(m, tl.max(z, 0))
        # Where every word so far is excluded by a logit of -inf, differences from it would be NaN.
        base = tl.where(largest == -float("inf"), 0.0, largest)
        before = tl.exp(m - base)
        distance = z - base
        e = tl.exp(distance)
        if ENTROPY:
            moved = tl.where(s > 0, m - base, 0.0)
            t = before * (t + s * moved) + tl.sum(tl.where(e > 0, e * distance, 0.0), 0)
        if SQUARE:
            q = q * before * before + tl.sum(e * e, 0)
        s = s * before + tl.sum(e, 0)
        m = largest
    normalizer = m + tl.log(s)
    tl.store(normalizers + row, normalizer)
    if HAS_LABELS:
        label = tl.load(labels + row)
        tl.store(log_probs + row, tl.load(logits + label).to(tl.float32) * scale - normalizer)
    if ENTROPY:
        tl.store(entropies + row, tl.log(s) - t / s)
    if SQUARE:
        tl.store(squares + row, q / (s * s))


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]  # Triton reads the annotations of a kernel
    logits,
    labels,
    normalizers,
    entropies,
    of_log_probs,
    of_entropies,
    grad_logits,
    scale,
    stride,
    grad_stride,
    words,
    HAS_LABELS: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """scale (g_lp ([j = y] - p_j) - g_H p_j (log p_j + H)) of some words of one token.

    `grad_logits` may be the logits.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < words
    z = tl.load(logits + row * stride + columns, mask=inside, other=-float("inf")).to(tl.float32) * scale
    log_p = z - tl.load(normalizers + row)
    p = tl.exp(log_p)
    step = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_LABELS:
        g = tl.load(of_log_probs + row)
        label = tl.load(labels + row)
        step += g * (tl.where(columns == label, 1.0, 0.0) - p)
    if ENTROPY:
        # A word that is excluded has p = 0 and no gradient; 0 * -inf would be NaN.
        step -= tl.load(of_entropies + row) * tl.where(p > 0, p * (log_p + tl.load(entropies + row)), 0.0)
    tl.store(grad_logits + row * grad_stride + columns, (step * scale).to(grad_logits.dtype.element_ty), mask=inside)


def statistics(
    logits: Tensor, labels: Tensor | None, scale: float, entropy: bool, sum_pi_squared: bool, block: int = BLOCK
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """log p(label), entropy, sum of squared probabilities and log sum exp z, float32 `[N]`; None where not requested.

    Args:
        logits: `[N, V]`, float32 or less; the words of a token lie one after the other.
        labels: `[N]`, below V.
        block: a power of two.
    """
    tokens, words = logits.shape

    def allocated(needed: bool) -> Tensor | None:
        return torch.empty(tokens, dtype=torch.float32, device=logits.device) if needed else None

    log_probs, token_entropy, square = allocated(labels is not None), allocated(entropy), allocated(sum_pi_squared)
    normalizer = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    if tokens:
        _statistics[(tokens,)](
            logits,
            normalizer if labels is None else labels,
            normalizer,
            normalizer if log_probs is None else log_probs,
            normalizer if token_entropy is None else token_entropy,
            normalizer if square is None else square,
            scale,
            logits.stride(0),
            words,
            HAS_LABELS=labels is not None,
            ENTROPY=entropy,
            SQUARE=sum_pi_squared,
            BLOCK=min(block, triton.next_power_of_2(words)),
            num_warps=_WARPS,
        )
    return log_probs, token_entropy, square, normalizer


def gradient(
    logits: Tensor,
    labels: Tensor | None,
    scale: float,
    normalizer: Tensor,
    entropy: Tensor | None,
    g_lp: Tensor | None,
    g_entropy: Tensor | None,
    out: Tensor,
    block: int = BLOCK,
) -> Tensor:
    """Gradient of sum(g_lp lp + g_H H) with respect to the logits, `[N, V]`, written into `out`, which is returned.

    Args:
        labels: `[N]`; one outside of 0 to V - 1 is that of a word that is not among these.
        normalizer: log sum exp z over all words, of which `logits` may have a part.
        out: `[N, V]`, of any float dtype; the logits themselves, if nothing else reads them afterwards.
    """
    tokens, words = logits.shape
    has_labels, with_entropy = g_lp is not None, g_entropy is not None and entropy is not None
    if not (has_labels or with_entropy):
        return out.zero_()
    if tokens:
        block = min(block, triton.next_power_of_2(words))
        if has_labels and labels is None:  # of a tile without the label's word
            labels = torch.full_like(normalizer, -1, dtype=torch.int64)
        _gradient[(tokens, triton.cdiv(words, block))](
            logits,
            normalizer if labels is None else labels,
            normalizer,
            normalizer if entropy is None else entropy,
            normalizer if g_lp is None else g_lp.contiguous(),
            normalizer if g_entropy is None else g_entropy.contiguous(),
            out,
            scale,
            logits.stride(0),
            out.stride(0),
            words,
            HAS_LABELS=has_labels,
            ENTROPY=with_entropy,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return out
