"""Distillation: how far the policy is from a teacher, for each response token.

Legend: B sequences, T response tokens, K tokens of the vocabulary that the teacher finds most likely, V vocabulary;
p policy, q teacher.

A loss is a function of log p and log q that returns one value per token. Its entry says what it reads:

| reads      | log p, log q      | the run sends from the teacher to the policy            |
|------------|-------------------|---------------------------------------------------------|
| tokens     | [B, T]            | the log-probability of the sampled token                |
| top        | [..., K]          | K tokens and their log-probabilities                    |
| vocabulary | [..., V]          | nothing: both models compute in one process             |

    @register_distillation_loss("mine", reads="top")
    def mine(log_prob, teacher_log_prob):
        return (log_prob - teacher_log_prob).square().mean(-1)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.functional import log_softmax_of, rows_at_a_time, working_dtype
from hybridrl.algorithms.kl import kl_penalty_forward
from hybridrl.errors import AlgorithmError
from hybridrl.registry import DISTILLATION_LOSSES
from hybridrl.utils.entry_metadata import DistillationMetadata

DistillationFn = Callable[[Tensor, Tensor], Tensor]

# Its exp is 0, so it can replace a log-probability of -inf in products with the probability.
_LOWEST_LOG_P = -1e4
# The least probability of the rest of the vocabulary: a difference of two masses is only known to rounding.
_LEAST_REST = 1e-6


def register_distillation_loss(
    name: str, *, reads: str = "tokens", direct: bool = True
) -> Callable[[DistillationFn], DistillationFn]:
    """Return a decorator that registers a distillation loss. A name taken by another function is refused.

    Args:
        name: value of `distillation.distillation_loss.loss_mode`.
        reads, direct: see `hybridrl.utils.entry_metadata.DistillationMetadata`.
    """

    def decorate(fn: DistillationFn) -> DistillationFn:
        DISTILLATION_LOSSES.add(name, fn, DistillationMetadata(reads=reads, direct=direct))
        return fn

    return decorate


def get_distillation_loss_fn(name: str) -> DistillationFn:
    """Return the distillation loss of a name; raise AlgorithmError with the known names if there is none."""
    loss_fn: DistillationFn = DISTILLATION_LOSSES.get(name)
    return loss_fn


def distillation_losses(
    name: str, log_prob: Tensor, teacher_log_prob: Tensor, log_prob_min_clamp: float | None = None
) -> Tensor:
    """Compute the loss of each token.

    Args:
        name: a registered loss.
        log_prob: log p, with gradient; its shape is that of the table of this module.
        teacher_log_prob: log q, of the same shape.
        log_prob_min_clamp: where the loss compares several tokens, both are clamped to at least this.

    Returns:
        [B, T], or [...] for several tokens of a position.

    Raises:
        AlgorithmError: the name is unknown, the shapes differ, or the loss returns another shape.
    """
    fn, reads = get_distillation_loss_fn(name), DISTILLATION_LOSSES.metadata(name).reads
    if log_prob.shape != teacher_log_prob.shape:
        raise AlgorithmError(
            f"distillation loss {name}: log-probabilities of the policy have shape {tuple(log_prob.shape)} and those "
            f"of the teacher {tuple(teacher_log_prob.shape)}; both must be alike."
        )
    if reads != "tokens":
        lowest = _LOWEST_LOG_P if log_prob_min_clamp is None else log_prob_min_clamp
        log_prob, teacher_log_prob = log_prob.clamp(min=lowest), teacher_log_prob.clamp(min=lowest)
    losses = fn(log_prob, teacher_log_prob)
    expected = log_prob.shape if reads == "tokens" else log_prob.shape[:-1]
    if losses.shape != expected:
        raise AlgorithmError(
            f"distillation loss {name} returned shape {tuple(losses.shape)}; it must be {tuple(expected)}, one value "
            "per token."
        )
    return losses


# ---------------------------------------------------------------- of the sampled token


@register_distillation_loss("kl", reads="tokens", direct=False)
@register_distillation_loss("k1", reads="tokens", direct=False)
def k1(log_prob: Tensor, teacher_log_prob: Tensor) -> Tensor:
    """log p - log q. Its gradient, that of log p, does not depend on the teacher: it is for the policy gradient."""
    return kl_penalty_forward(log_prob, teacher_log_prob, "k1")


@register_distillation_loss("abs", reads="tokens")
def absolute(log_prob: Tensor, teacher_log_prob: Tensor) -> Tensor:
    """|log p - log q|."""
    return kl_penalty_forward(log_prob, teacher_log_prob, "abs")


@register_distillation_loss("mse", reads="tokens")
@register_distillation_loss("k2", reads="tokens")
def k2(log_prob: Tensor, teacher_log_prob: Tensor) -> Tensor:
    """(log p - log q)^2 / 2, whose gradient is an unbiased one of KL(p || q)."""
    return kl_penalty_forward(log_prob, teacher_log_prob, "k2")


@register_distillation_loss("low_var_kl", reads="tokens")
@register_distillation_loss("k3", reads="tokens")
def k3(log_prob: Tensor, teacher_log_prob: Tensor) -> Tensor:
    """q / p - 1 - log(q / p), an unbiased estimate of KL(p || q) (Schulman 2020), at most 10."""
    return kl_penalty_forward(log_prob, teacher_log_prob, "k3")


# ---------------------------------------------------------------- of several tokens of each position


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _with_rest(log_p: Tensor) -> Tensor:
    """log p and, as one more token, the logarithm of the probability of all others, [..., K + 1]."""
    rest = (1.0 - log_p.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_REST)
    return torch.cat([log_p, rest.log()], dim=-1)


@register_distillation_loss("forward_kl_topk", reads="top")
@register_distillation_loss("forward_kl", reads="vocabulary")
def forward_kl(log_prob: Tensor, teacher_log_prob: Tensor) -> Tensor:
    """sum_v q_v (log q_v - log p_v), KL(q || p): over the vocabulary, or over the teacher's K tokens."""
    return _kl(teacher_log_prob, log_prob)


@register_distillation_loss("reverse_kl_topk", reads="top")
@register_distillation_loss("reverse_kl", reads="vocabulary")
def reverse_kl(log_prob: Tensor, teacher_log_prob: Tensor) -> Tensor:
    """sum_v p_v (log p_v - log q_v), KL(p || q): over the vocabulary, or over the teacher's K tokens."""
    return _kl(log_prob, teacher_log_prob)


@register_distillation_loss("jsd", reads="vocabulary")
def jensen_shannon(log_prob: Tensor, teacher_log_prob: Tensor) -> Tensor:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2; at most log 2."""
    middle = torch.logaddexp(log_prob, teacher_log_prob) - math.log(2.0)
    return 0.5 * (_kl(log_prob, middle) + _kl(teacher_log_prob, middle))


@register_distillation_loss("forward_kl_topk_tail", reads="top")
def forward_kl_topk_tail(log_prob: Tensor, teacher_log_prob: Tensor) -> Tensor:
    """KL(q || p) with all other tokens as one: over K + 1 categories, so never negative and at most the whole KL."""
    return _kl(_with_rest(teacher_log_prob), _with_rest(log_prob))


@register_distillation_loss("reverse_kl_topk_tail", reads="top")
def reverse_kl_topk_tail(log_prob: Tensor, teacher_log_prob: Tensor) -> Tensor:
    """KL(p || q) with all other tokens as one: over K + 1 categories, so never negative and at most the whole KL."""
    return _kl(_with_rest(log_prob), _with_rest(teacher_log_prob))


# ---------------------------------------------------------------- from logits, a chunk of tokens at a time


def _rows(logits: Tensor) -> int:
    return rows_at_a_time(logits.device.type, len(logits), logits.shape[-1])


def top_log_probs(logits: Tensor, count: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the `count` largest log-probabilities of softmax(logits / temperature), and their tokens.

    Args:
        logits: [N, V].

    Returns:
        [N, K] in float32 and [N, K] int32, the most likely token first.

    Raises:
        AlgorithmError: the vocabulary has fewer tokens.
    """
    if count > logits.shape[-1]:
        raise AlgorithmError(
            f"distillation.distillation_loss.topk={count} is more than the {logits.shape[-1]} tokens of the teacher's "
            "vocabulary; lower it, or use a loss over the vocabulary (forward_kl, reverse_kl)."
        )
    chunks, step = [], _rows(logits)
    for start in range(0, len(logits), step):
        chunks.append(log_softmax_of(logits[start : start + step], 1.0 / temperature).topk(count, dim=-1))
    if not chunks:
        return logits.new_zeros(0, count, dtype=working_dtype(logits.dtype)), logits.new_zeros(
            0, count, dtype=torch.int32
        )
    return torch.cat([chunk.values for chunk in chunks]), torch.cat([chunk.indices for chunk in chunks]).int()


class _LogProbsAt(torch.autograd.Function):
    """log softmax(scale * z) at K tokens of each row; d/dz_j = scale (sum_k g_k [j = y_k] - p_j sum_k g_k)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, scale: float) -> Tensor:
        parts, step = [], _rows(logits)
        for start in range(0, len(logits), step):
            part = slice(start, start + step)
            parts.append(log_softmax_of(logits[part], scale).gather(-1, ids[part]))
        ctx.save_for_backward(logits, ids)
        ctx.scale = scale
        return torch.cat(parts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids = ctx.saved_tensors
        grad_logits, step = torch.empty_like(logits), _rows(logits)
        for start in range(0, len(logits), step):
            part = slice(start, start + step)
            chunk = log_softmax_of(logits[part], ctx.scale).exp().mul_(-grad[part].sum(-1, keepdim=True))
            grad_logits[part] = chunk.scatter_add_(-1, ids[part], grad[part].to(chunk.dtype)).mul_(ctx.scale)
        return grad_logits, None, None


def log_probs_at(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log softmax(logits / temperature) at K tokens of each row, differentiable.

    Args:
        logits: [N, V]; the backward pass keeps them and nothing else of their size.
        ids: [N, K] integers.

    Returns:
        [N, K] in float32 (float64 for float64 logits).
    """
    if not len(logits):
        return logits.sum(-1, keepdim=True).to(working_dtype(logits.dtype)).expand(0, ids.shape[-1])
    log_probs: Tensor = _LogProbsAt.apply(logits, ids.long(), 1.0 / temperature)
    return log_probs


class _Divergence(torch.autograd.Function):
    """A function of two chunks of log-probabilities [n, V]; the backward pass computes each chunk again."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, teacher: Tensor, scales: tuple[float, float], compare: DistillationFn
    ) -> Tensor:
        ctx.save_for_backward(logits, teacher)
        ctx.scales, ctx.compare = scales, compare
        parts, step = [], _rows(logits)
        for start in range(0, len(logits), step):
            part = slice(start, start + step)
            parts.append(compare(log_softmax_of(logits[part], scales[0]), log_softmax_of(teacher[part], scales[1])))
        return torch.cat(parts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, teacher = ctx.saved_tensors
        grad_logits, step = torch.empty_like(logits), _rows(logits)
        for start in range(0, len(logits), step):
            part = slice(start, start + step)
            with torch.enable_grad():
                own = logits[part].detach().requires_grad_()
                log_q = log_softmax_of(teacher[part], ctx.scales[1])
                value = ctx.compare(log_softmax_of(own, ctx.scales[0]), log_q)
                (grad_logits[part],) = torch.autograd.grad(value, own, grad[part])
        return grad_logits, None, None, None


def vocabulary_losses(
    name: str,
    logits: Tensor,
    teacher_logits: Tensor,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
    log_prob_min_clamp: float | None = None,
) -> Tensor:
    """Compute a distillation loss over the vocabulary, with its exact gradient, a chunk of tokens at a time.

    Args:
        name: a loss that reads the vocabulary.
        logits: [N, V], with gradient.
        teacher_logits: [N, V]; they receive no gradient.
        temperature, teacher_temperature: p = softmax(logits / temperature), and q likewise.
        log_prob_min_clamp: see `distillation_losses`.

    Returns:
        [N] in float32 (float64 for float64 logits).

    Raises:
        AlgorithmError: the two vocabularies differ in size.
    """
    if logits.shape != teacher_logits.shape:
        raise AlgorithmError(
            f"logits have shape {tuple(logits.shape)} and the teacher's {tuple(teacher_logits.shape)}; a loss over the "
            "vocabulary needs one of the same size in both models."
        )
    if not len(logits):
        return logits.sum(-1).to(working_dtype(logits.dtype))

    def compare(log_p: Tensor, log_q: Tensor) -> Tensor:
        return distillation_losses(name, log_p, log_q, log_prob_min_clamp)

    losses: Tensor = _Divergence.apply(
        logits, teacher_logits.detach(), (1.0 / temperature, 1.0 / teacher_temperature), compare
    )
    return losses
