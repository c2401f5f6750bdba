"""Log-probabilities, entropy and sum of squared probabilities over a vocabulary that is split over ranks.

Legend: N tokens, H features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from hybridrl.algorithms import functional
from hybridrl.algorithms.functional import token_statistics, working_dtype
from hybridrl.algorithms.linear_statistics import chunks, layer_gradients, linear_token_statistics, rows_at_a_time
from hybridrl.errors import AlgorithmError

#: what is computed, in this order
STATISTICS = "log_probs", "entropy", "sum_pi_squared"

# exp of it is 0, so it can replace a difference of -inf in products with the exponential
_LOWEST = -1e4
# Elements of the float32 temporaries of one pass over some rows.
_BLOCK_ELEMENTS = 1 << 24


class VocabularyShard(NamedTuple):
    """The part of the vocabulary that a rank has logits of.

    Attributes:
        first: id of its first token.
        size: number of its tokens; logits after them are padding.
        group: the ranks that share the vocabulary.
        vocabulary: number of all tokens, without padding.
    """

    first: int
    size: int
    group: Any
    vocabulary: int

    @classmethod
    def of(cls, vocabulary: int, padded: int, group: Any) -> VocabularyShard:
        """This rank's part; all are equal, but for padding at the end of the last ones."""
        share = padded // group.size()
        first = share * group.rank()
        return cls(first, max(0, min(share, vocabulary - first)), group, vocabulary)

    def places(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a mask of the labels in this part, and their places in it; other labels get an arbitrary place."""
        local = labels - self.first
        return (local >= 0) & (local < self.size), local.clamp(0, max(self.size - 1, 0))


def parallel_statistics(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    outputs: Collection[str],
    part: VocabularyShard,
    chunk_size: int | None = None,
    most_tokens: int | None = None,
) -> dict[str, torch.Tensor]:
    """`log_probs`, `entropy`, `sum_pi_squared` of softmax(logits / temperature), float32 `[N]`, the same on each rank.

    Args:
        logits: `[N, padded vocabulary / ranks]`; the backward pass may overwrite them.
        labels: `[N]`.
        outputs: which of the three.
        chunk_size: tokens at a time on one rank with the whole vocabulary; by default as many as compute fast.
        most_tokens: a limit of this default, and of the tokens at a time on ranks that share the vocabulary.
    """
    logits = logits[:, : part.size]
    if part.group.size() == 1:
        options = _options(labels, temperature, outputs)
        if chunk_size is None:
            chunk_size = functional.rows_at_a_time(logits.device.type, len(logits), logits.shape[1], most_tokens)
        return token_statistics(logits, **options, inplace_backward=True, chunk_size=chunk_size)
    return _named(_ParallelStatistics.apply(logits, labels, _scale(temperature), part, most_tokens), outputs)


def parallel_linear_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    outputs: Collection[str],
    part: VocabularyShard,
    chunk_size: int | None = None,
    most_tokens: int | None = None,
) -> dict[str, torch.Tensor]:
    """Compute `parallel_statistics` of logits = hidden W^T, which exist for a chunk of tokens at a time.

    Args:
        hidden: `[N, H]`, the same on each rank. Its gradient is the whole one on each rank.
        weight: this rank's rows of the output layer, `[padded vocabulary / ranks, H]`.
        labels: `[N]`.
        outputs: which of the three.
        chunk_size: tokens at a time; by default as many as make an efficient matrix product.
        most_tokens: a limit of this default.
    """
    rows = rows_at_a_time(hidden.device.type, len(weight), most_tokens) if chunk_size is None else chunk_size
    if part.group.size() == 1:
        own = weight if part.size == len(weight) else weight[: part.size]
        return linear_token_statistics(hidden, own, chunk_size=rows, **_options(labels, temperature, outputs))
    statistics = _ParallelLinearStatistics.apply(hidden, weight, labels, _scale(temperature), part, rows)
    return _named(statistics, outputs)


def _options(labels: torch.Tensor, temperature: float, outputs: Collection[str]) -> dict[str, Any]:
    """The arguments of the statistics of one rank."""
    return {
        "labels": labels if "log_probs" in outputs else None,
        "temperature": temperature,
        "entropy": "entropy" in outputs,
        "sum_pi_squared": "sum_pi_squared" in outputs,
    }


def _scale(temperature: float) -> float:
    if not temperature > 0:
        raise AlgorithmError(f"temperature is {temperature}; the training distribution needs one above 0.")
    return 1.0 / temperature


def _named(statistics: Sequence[torch.Tensor], outputs: Collection[str]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in zip(STATISTICS, statistics, strict=True) if name in outputs}


class _Sums(NamedTuple):
    """Partial sums of the softmax over a rank's own words, for each of N tokens: z = scale * logits, m = max z.

    Attributes:
        top: m.
        values: sum exp(z - m); z_y - m, or 0 if another rank has y; sum exp(z - m) (z - m); sum exp(2 (z - m)).
    """

    top: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, tokens: int, like: torch.Tensor) -> _Sums:
        values = torch.zeros(4, tokens, dtype=working_dtype(like.dtype), device=like.device)
        # A rank may have padding alone.
        return cls(torch.full_like(values[0], torch.finfo(values.dtype).min), values)

    def of(self, rows: slice) -> _Sums:
        return _Sums(self.top[rows], self.values[:, rows])

    def fill(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        scale: float,
        part: VocabularyShard,
        most_tokens: int | None = None,
    ) -> None:
        """Compute them from the logits `[N, part.size]`, of at most so many tokens at a time."""
        if not part.size:
            return
        own, local = part.places(labels)
        for rows in _blocks(logits, most_tokens):
            shifted = logits[rows].to(self.top.dtype) * scale
            # Finite, so that a logit of -inf has a difference from it.
            top = torch.maximum(self.top[rows], shifted.amax(-1))
            self.top[rows] = top
            shifted.sub_(top[:, None])
            at_label = shifted.gather(-1, local[rows, None]).squeeze(-1)
            self.values[1, rows] = torch.where(own[rows], at_label, 0.0)
            p = shifted.exp()
            self.values[0, rows] = p.sum(-1)
            self.values[2, rows] = shifted.clamp_(min=_LOWEST).mul_(p).sum(-1)
            self.values[3, rows] = p.mul_(p).sum(-1)

    def over_ranks(self, labels: torch.Tensor, part: VocabularyShard) -> tuple[torch.Tensor, ...]:
        """log p(y), H, sum p^2, and m + log S, whose difference from z is log p; the same on each rank.

        With M the maximum and d = m - M, a rank's sums relative to M are

            exp(d) S      z_y - m + d      exp(d) (W + d S)      exp(2 d) Q

        of its S, z_y - m, W and Q in the order of `values`.
        """
        top = self.top.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=part.group)
        difference = self.top - top
        total, label, weighted, squares = self.values
        label = torch.where(part.places(labels)[0], label + difference, 0.0)
        difference = difference.clamp(min=_LOWEST)
        share = difference.exp()
        sums = torch.stack([total * share, label, (weighted + difference * total) * share, squares * share**2])
        dist.all_reduce(sums, group=part.group)
        total, label, weighted, squares = sums
        log_total = total.log()
        return label - log_total, log_total - weighted / total, squares / total**2, top + log_total


class _ForBackward(NamedTuple):
    """Inputs of the backward pass in addition to logits, and its incoming gradients, `[N]` each."""

    labels: torch.Tensor
    normaliser: torch.Tensor
    entropy: torch.Tensor
    of_log_prob: torch.Tensor
    of_entropy: torch.Tensor

    def of(self, rows: slice) -> _ForBackward:
        return _ForBackward(*(tensor[rows] for tensor in self))

    def write(
        self,
        grad: torch.Tensor,
        logits: torch.Tensor,
        scale: float,
        part: VocabularyShard,
        most_tokens: int | None = None,
    ) -> torch.Tensor:
        """Write the gradient of the logits `[N, part.size]` into `grad`, which may be the logits."""
        own, local = part.places(self.labels)
        for rows in _blocks(logits, most_tokens):
            _, normaliser, entropy, of_log_prob, of_entropy = self.of(rows)
            log_p = (logits[rows].to(normaliser.dtype) * scale).sub_(normaliser[:, None])
            p = log_p.exp()
            of_log_p = log_p.clamp_(min=_LOWEST).add_(entropy[:, None]).mul_(of_entropy[:, None])
            step = of_log_p.add_(of_log_prob[:, None]).mul_(p).neg_()
            if part.size:
                step.scatter_add_(-1, local[rows, None], torch.where(own[rows], of_log_prob, 0.0)[:, None])
            grad[rows] = step.mul_(scale)
        return grad


class _ParallelStatistics(torch.autograd.Function):
    """With z = scale * logits, S = sum exp(z - m), m any number, over the whole vocabulary:

        log p(y) = z_y - m - log S      H = log S - sum exp(z - m) (z - m) / S      sum p^2 = sum exp(2 (z - m)) / S^2

        d log p(y) / d z_j = [j = y] - p_j          d H / d z_j = -p_j (log p_j + H)

    Ranks exchange one maximum and four sums per token. The backward pass needs no exchange.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        scale: float,
        part: VocabularyShard,
        most_tokens: int | None,
    ) -> tuple[torch.Tensor, ...]:
        sums = _Sums.empty(len(logits), logits)
        sums.fill(logits, labels, scale, part, most_tokens)
        log_prob, entropy, squared, normaliser = sums.over_ranks(labels, part)
        ctx.save_for_backward(logits, labels, normaliser, entropy)
        ctx.scale, ctx.part, ctx.most_tokens = scale, part, most_tokens
        ctx.mark_non_differentiable(squared)
        return log_prob, entropy, squared

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, *saved = ctx.saved_tensors
        inputs = _ForBackward(*saved, *gradients[:2])
        grad = inputs.write(torch.empty_like(logits), logits, ctx.scale, ctx.part, ctx.most_tokens)
        return grad, None, None, None, None


class _ParallelLinearStatistics(torch.autograd.Function):
    """`_ParallelStatistics` of logits = hidden W^T, which both passes compute a chunk of tokens at a time.

    With g the gradient of a rank's logits of a chunk:

        d hidden = sum over ranks of g W          d W = sum over chunks of g^T hidden

    The forward pass has the same exchanges, and the backward pass that sum over ranks; none is per chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        scale: float,
        part: VocabularyShard,
        rows: int,
    ) -> tuple[torch.Tensor, ...]:
        sums = _Sums.empty(len(hidden), hidden)
        for chunk in chunks(len(hidden), rows):
            sums.of(chunk).fill(linear(hidden[chunk], weight[: part.size]), labels[chunk], scale, part)
        log_prob, entropy, squared, normaliser = sums.over_ranks(labels, part)
        ctx.save_for_backward(hidden, weight, labels, normaliser, entropy)
        ctx.scale, ctx.part, ctx.rows = scale, part, rows
        ctx.mark_non_differentiable(squared)
        return log_prob, entropy, squared

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, *saved = ctx.saved_tensors
        scale, part = ctx.scale, ctx.part
        inputs = _ForBackward(*saved, *gradients[:2])

        def of_logits(chunk: slice) -> torch.Tensor:
            logits = linear(hidden[chunk], weight[: part.size])
            return inputs.of(chunk).write(logits, logits, scale, part)

        wants = (*ctx.needs_input_grad[:2], False)
        d_hidden, d_weight, _ = layer_gradients(hidden, weight, None, wants, ctx.rows, of_logits)
        if d_hidden is not None:
            dist.all_reduce(d_hidden, group=part.group)
        return d_hidden, d_weight, None, None, None, None


def _blocks(logits: torch.Tensor, most: int | None = None) -> list[slice]:
    """Slices of at most so many rows, whose temporaries are of limited size."""
    rows = max(1, _BLOCK_ELEMENTS // max(1, logits.shape[1]))
    return chunks(len(logits), rows if most is None else min(rows, most))
