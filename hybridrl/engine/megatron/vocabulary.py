"""Log-probabilities, entropy and sum of squared probabilities from logits whose vocabulary is split over ranks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hybridrl.algorithms.functional import token_statistics, working_dtype
from hybridrl.errors import AlgorithmError

# exp of it is 0, so it can replace a difference of -inf in products with the exponential
_LOWEST = -1e4
# Elements of the float32 temporaries of one pass over some rows.
_CHUNK_ELEMENTS = 1 << 24


class Part(NamedTuple):
    """The part of the vocabulary that a rank has logits of.

    Attributes:
        first: id of its first token.
        size: number of its tokens; logits after them are padding.
        group: the ranks that share the vocabulary.
    """

    first: int
    size: int
    group: Any

    @classmethod
    def of(cls, vocabulary: int, padded: int, group: Any) -> Part:
        """This rank's part; all are equal, but for padding at the end of the last ones."""
        share = padded // group.size()
        first = share * group.rank()
        return cls(first, max(0, min(share, vocabulary - first)), group)


def parallel_statistics(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, outputs: Collection[str], part: Part
) -> dict[str, torch.Tensor]:
    """`log_probs`, `entropy`, `sum_pi_squared` of softmax(logits / temperature), float32 `[N]`, the same on each rank.

    Args:
        logits: `[N, padded vocabulary / ranks]`; the backward pass may overwrite them.
        labels: `[N]`.
        outputs: which of the three.
    """
    logits = logits[:, : part.size]
    wants = {name: name in outputs for name in ("entropy", "sum_pi_squared")}
    if part.group.size() == 1:
        return token_statistics(
            logits, labels if "log_probs" in outputs else None, temperature, **wants, inplace_backward=True
        )
    if not temperature > 0:
        raise AlgorithmError(f"temperature is {temperature}; the training distribution needs one above 0.")
    found = _ParallelStatistics.apply(logits, labels, 1.0 / temperature, part)
    names = ("log_probs", "entropy", "sum_pi_squared")
    return {name: tensor for name, tensor in zip(names, found, strict=True) if name in outputs}


class _ParallelStatistics(torch.autograd.Function):
    """With z = scale * logits, m = max z, S = sum exp(z - m), over the whole vocabulary:

        log p(y) = z_y - m - log S      H = log S - sum exp(z - m) (z - m) / S      sum p^2 = sum exp(2 (z - m)) / S^2

        d log p(y) / d z_j = [j = y] - p_j          d H / d z_j = -p_j (log p_j + H)

    Ranks exchange one maximum and four sums per token. The backward pass needs no exchange.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, scale: float, part: Part
    ) -> tuple[torch.Tensor, ...]:
        dtype = working_dtype(logits.dtype)
        # A rank may have padding alone.
        top = logits.amax(-1).to(dtype) if part.size else logits.new_full(logits.shape[:1], -torch.inf, dtype=dtype)
        top = top * scale
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=part.group)
        own = (labels >= part.first) & (labels < part.first + part.size)
        local = (labels - part.first).clamp(0, max(part.size - 1, 0))
        sums = torch.zeros(4, len(logits), dtype=dtype, device=logits.device)
        for rows in _chunks(logits):
            shifted = (logits[rows].to(dtype) * scale).sub_(top[rows, None])
            if part.size:
                at_label = shifted.gather(-1, local[rows, None]).squeeze(-1)
                sums[1, rows] = torch.where(own[rows], at_label, 0.0)
            p = shifted.exp()
            sums[0, rows] = p.sum(-1)
            sums[2, rows] = shifted.clamp_(min=_LOWEST).mul_(p).sum(-1)
            sums[3, rows] = p.mul_(p).sum(-1)
        dist.all_reduce(sums, group=part.group)
        total, label, weighted, squares = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        squared = squares / total**2
        ctx.save_for_backward(logits, top + log_total, local, own, entropy)
        ctx.scale = scale
        ctx.mark_non_differentiable(squared)
        return label - log_total, entropy, squared

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, normaliser, local, own, entropy = ctx.saved_tensors
        of_log_prob, of_entropy = gradients[0], gradients[1]
        grad = torch.empty_like(logits)
        for rows in _chunks(logits):
            log_p = (logits[rows].to(normaliser.dtype) * ctx.scale).sub_(normaliser[rows, None])
            p = log_p.exp()
            of_log_p = log_p.clamp_(min=_LOWEST).add_(entropy[rows, None]).mul_(of_entropy[rows, None])
            step = of_log_p.add_(of_log_prob[rows, None]).mul_(p).neg_()
            if logits.shape[1]:
                step.scatter_add_(-1, local[rows, None], torch.where(own[rows], of_log_prob[rows], 0.0)[:, None])
            grad[rows] = step.mul_(ctx.scale)
        return grad, None, None, None


def _chunks(logits: torch.Tensor) -> list[slice]:
    """Slices of rows whose temporaries are of limited size."""
    step = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1]))
    return [slice(start, start + step) for start in range(0, len(logits), step)]
