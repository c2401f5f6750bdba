"""Statistics over groups of samples of one prompt, without a loop over rows.

Legend: B samples, T response tokens, g(i) the group of sample i, n_g its size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.functional import masked_row_sum, rounding_of, row_blocks
from hybridrl.errors import AlgorithmError


class Groups:
    """The groups to which samples belong: of any size, with samples in any order.

    Attributes:
        ids: [B] int64, index of each sample's group.
        count: number of groups.
        sizes: [count] float64, n_g.
    """

    def __init__(self, index: np.ndarray | Tensor | Sequence[object], device: torch.device) -> None:
        if isinstance(index, Tensor):
            _, ids = torch.unique(index, return_inverse=True)
            self.ids = ids.to(device)
        else:
            keys = index.tolist() if isinstance(index, np.ndarray) else list(index)
            unique = list(dict.fromkeys(keys))
            number_of = dict(zip(unique, range(len(unique)), strict=True))
            self.ids = torch.from_numpy(np.fromiter(map(number_of.__getitem__, keys), np.int64, len(keys))).to(device)
        self.count = int(self.ids.max()) + 1 if len(self.ids) else 0
        self.sizes = self.sum(torch.ones(len(self.ids), dtype=torch.float64, device=device))

    @property
    def size(self) -> Tensor:
        """[B] float64: the size of each sample's own group."""
        return self.sizes[self.ids]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each group: [B, ...] -> [count, ...]."""
        zeros = values.new_zeros((self.count, *values.shape[1:]))
        return zeros.index_add_(0, self.ids, values)

    def mean(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean of each sample's own group, [B, ...] -> [B, ...]: equal values have exactly their value as the mean.

        Args:
            values: [B, ...].
            weights: of the values, [B, ...], not negative; None: all 1. Where a group's are all 0 the mean is 0.
        """
        weights = torch.ones_like(values) if weights is None else weights
        total = self.sum(weights)
        base = torch.where(total > 0, self.smallest(torch.where(weights > 0, values, torch.inf)), 0.0)
        distances = torch.where(weights > 0, values - base[self.ids], 0.0)
        return (base + self.sum(distances * weights) / torch.where(total > 0, total, 1.0))[self.ids]

    def smallest(self, values: Tensor) -> Tensor:
        """Smallest value of each group: [B, ...] -> [count, ...]."""
        ids = self.ids.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
        highest = values.new_full((self.count, *values.shape[1:]), torch.inf)
        return highest.scatter_reduce(0, ids, values, "amin")

    def levelled(self, values: Tensor, rounding: Tensor) -> Tensor:
        """The values; those of a group that differ by rounding alone become equal to the smallest one.

        Args:
            values: [B, ...].
            rounding: [B] or [B, ...], what `rounding_of` says of each; the largest of a group counts.
        """
        rounding = rounding.view(-1, *[1] * (values.dim() - rounding.dim()), *rounding.shape[1:]).expand_as(values)
        range_ = -self.smallest(-values) - self.smallest(values)
        equal = range_ <= -self.smallest(-rounding.to(values.dtype))
        return torch.where(equal[self.ids], self.smallest(values)[self.ids], values)

    def std(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation of each sample's own group, [B] -> [B]; 1 for a group of one."""
        squares = self.sum((values - self.mean(values)) ** 2)
        std = torch.sqrt(squares / (self.sizes - 1).clamp(min=1))
        return torch.where(self.sizes > 1, std, 1.0)[self.ids]

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest value of each group: [B] -> ([count], [count])."""
        lowest = values.new_full((self.count,), -torch.inf)
        largest = lowest.scatter_reduce(0, self.ids, values, "amax")
        return (-lowest).scatter_reduce(0, self.ids, values, "amin"), largest

    def best_and_second(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Find the best sample of each group and the second-best value.

        Returns:
            (is_best, second): [B] bool, true for one sample per group, the first of those with the largest value; and
            [B], the largest value of the others in the sample's group (-inf in a group of one).
        """
        lowest = values.new_full((self.count,), -torch.inf)
        best = self.extremes(values)[1][self.ids]
        rows = torch.arange(len(values), device=values.device)
        last = rows.new_full((self.count,), len(values))
        first = last.scatter_reduce(0, self.ids, torch.where(values == best, rows, len(values)), "amin")
        is_best = rows == first[self.ids]
        others = torch.where(is_best, -torch.inf, values)
        return is_best, lowest.scatter_reduce(0, self.ids, others, "amax")[self.ids]


def group_samples(index: np.ndarray | Tensor | Sequence[object], rewards: Tensor) -> Groups:
    """Return the groups of a batch, checked against its number of rows."""
    if index is None:
        raise AlgorithmError("index is None: a group estimator needs the prompt's uid per row (the batch's 'uid').")
    if len(index) != rewards.shape[0]:
        raise AlgorithmError(f"index has {len(index)} entries for {rewards.shape[0]} rows; it needs one uid per row.")
    return Groups(index, rewards.device)


def outcome_scores(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Sum of the rewards on response tokens, [B, T] -> [B] in float64.

    Only rewards on response tokens count; values in padding are ignored.

    Raises:
        AlgorithmError: a reward is NaN or infinite (the message names the rows), or the shapes differ.
    """
    if token_level_rewards.shape != response_mask.shape:
        raise AlgorithmError(
            f"token_level_rewards have shape {tuple(token_level_rewards.shape)} and response_mask "
            f"{tuple(response_mask.shape)}; both must be [B, T]."
        )
    scores = masked_row_sum(token_level_rewards, response_mask, torch.float64)
    finite = torch.isfinite(scores)
    if not bool(finite.all()):
        rows = (~finite).nonzero().squeeze(-1)[:8].tolist()
        raise AlgorithmError(
            f"token_level_rewards are NaN or infinite in rows {rows}: look at what the reward function gave for them."
        )
    return scores


def score_rounding(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """The largest difference of `outcome_scores` that is rounding: `rounding_of` each sum's terms, [B, T] -> [B]."""
    terms = masked_row_sum(token_level_rewards.abs(), response_mask, torch.float64)
    return rounding_of(terms, token_level_rewards.dtype)


def levelled_scores(token_level_rewards: Tensor, response_mask: Tensor, groups: Groups) -> Tensor:
    """`outcome_scores`, which are equal in each group whose scores differ by rounding alone.

    Raises:
        AlgorithmError: see `outcome_scores`.
    """
    scores = outcome_scores(token_level_rewards, response_mask)
    return groups.levelled(scores, score_rounding(token_level_rewards, response_mask))


def spread(scores: Tensor, like: Tensor, response_mask: Tensor) -> Tensor:
    """Copy one number per sequence to all its response tokens: [B] -> [B, T] in the dtype of `like`, zero elsewhere."""
    column = scores.to(like.dtype).unsqueeze(-1)
    out = torch.empty_like(like)
    for block in row_blocks(out):
        out[block] = torch.where(response_mask[block].bool(), column[block], 0.0)
    return out
