"""Prefix trees of token sequences: which tokens rows share, and where each token is in one flat row.

Rows that are sorted as words are in a dictionary visit their prefix tree depth-first. A row shares its longest prefix
with the row before it, and the tokens after that prefix are new. The new tokens of all rows, one row after the other,
are the *flat row*, which holds each token of the tree once:

    row 0  a b c d        flat row   a b c d | x y | z
    row 1  a b x y        index      0 1 2 3   4 5   6
    row 2  a b x z        path of row 2: 0 1 4 6

The *path* of a row is the index of each of its tokens. A token attends to the tokens before it on its path. A *run* is
a part of the flat row whose tokens follow each other on one path, so its queries need one list of keys. A *piece* is a
part that every path holds as a whole or not at all, so the keys of a run are whole pieces.

Everything here is a function of token ids and lengths; no model is involved.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

#: share of a batch's tokens that sharing has to save to be chosen (`model.share_prefixes=null`); docs/prefix_sharing.md
WORTHWHILE_SHARE = 0.25


def share_saved(input_ids: torch.Tensor, attention: torch.Tensor, families: Iterable[object]) -> float:
    """The share of the tokens of `[B, S]` that are a prefix of a row and of the row of its family before it.

    That is what a prefix tree of each family saves if each row shares its longest prefix with the row before it, as
    the samples of a prompt and the turns of a session do; otherwise it is less. This reads each token twice and sorts
    nothing, because the controller does it for whole batches.

    Args:
        attention: nonzero at tokens.
        families: of each of the B rows.
    """
    real = attention.bool()
    tokens, ends = input_ids[real].numpy(), real.sum(1).cumsum(0).tolist()
    last: dict[object, np.ndarray] = {}
    saved = 0
    for family, start, end in zip(families, [0, *ends], ends, strict=False):
        row, before = tokens[start:end], last.get(family)
        if before is not None:
            saved += _common(before, row)
        last[family] = row
    return saved / len(tokens) if len(tokens) else 0.0


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Return the length of the common prefix of two lists of numbers."""
    differ = first[: len(second)] != second[: len(first)]
    return int(differ.argmax()) if differ.any() else len(differ)


@dataclass(frozen=True, slots=True)
class PrefixOrder:
    """Rows in the order of a dictionary, and how much each shares with the one before it.

    Attributes:
        rows: numbers of the rows.
        lengths: number of tokens of each, in this order.
        shared: length of the longest common prefix with the row before, in this order; 0 for the first.
    """

    rows: list[int]
    lengths: list[int]
    shared: list[int]

    @classmethod
    def of(cls, tokens: torch.Tensor, lengths: Sequence[int], rows: Sequence[int] | None = None) -> PrefixOrder:
        """Sort rows.

        Args:
            tokens: `[B, W]`, each row's tokens at its left end; or `[B, W, c]`, where tokens are shared only if all c
                numbers are equal (an id and positions).
            lengths: number of tokens of each of the B rows.
            rows: which of them; all by default.
        """
        # Strings of bytes compare fast. Any total order of the numbers will do, so signs do not matter.
        words = np.ascontiguousarray(tokens.reshape(*tokens.shape[:2], -1).numpy().astype(">i8"))
        keys = {row: words[row, : lengths[row]].tobytes() for row in (range(len(words)) if rows is None else rows)}
        order = sorted(keys, key=lambda row: keys[row])
        shared = [0] * min(1, len(order))
        for before, row in itertools.pairwise(order):
            common = min(lengths[before], lengths[row])
            differ = (words[before, :common] != words[row, :common]).any(-1)
            shared.append(int(differ.argmax()) if differ.any() else common)
        return cls(order, [lengths[row] for row in order], shared)

    def only(self, rows: Sequence[int]) -> PrefixOrder:
        """Return the order of some of the rows."""
        if rows and rows[0] in self.rows:
            start = self.rows.index(rows[0])
            stop = start + len(rows)
            if self.rows[start:stop] == list(rows):  # as those of a micro-batch are
                return PrefixOrder(list(rows), self.lengths[start:stop], [0, *self.shared[start + 1 : stop]])
        selected, order = set(rows), PrefixOrder([], [], [])
        common = 0  # with the last row that is kept: the least of what the rows in between share
        for row, length, shared in zip(self.rows, self.lengths, self.shared, strict=True):
            common = min(common, shared)
            if row in selected:
                order.rows.append(row)
                order.lengths.append(length)
                order.shared.append(common)
                common = length
        return order

    def in_units(self, together: int) -> PrefixOrder:
        """The same rows, where those of a unit follow each other: rows 0 to `together` - 1, and so on.

        `shared` is then what a row has in common with the one before it; another row may share more with it.
        """
        place = {row: number for number, row in enumerate(self.rows)}
        units: dict[int, list[int]] = {}
        for row in self.rows:
            units.setdefault(row // together, []).append(row)
        rows = [row for unit in units.values() for row in unit]
        common = [0] * min(1, len(rows))
        for before, row in itertools.pairwise(rows):
            first, last = sorted((place[before], place[row]))
            common.append(min(self.shared[first + 1 : last + 1]))
        return PrefixOrder(rows, [self.lengths[place[row]] for row in rows], common)

    @property
    def tokens(self) -> int:
        """Tokens of the tree."""
        return sum(self.lengths) - sum(self.shared)


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of the flat row that follow each other on one path.

    Attributes:
        start, stop: where they are in the flat row.
        before: tokens of the path before them.
        pieces: numbers of the pieces of the path, up to the end of the run.
    """

    start: int
    stop: int
    before: int
    pieces: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The flat row of some rows.

    Attributes:
        paths: for each row, in the order of the dictionary, where its tokens are in the flat row.
        runs: in the order of the flat row, which they cover.
        pieces: sizes of the pieces, in the order of the flat row.
    """

    paths: list[np.ndarray]
    runs: list[Run]
    pieces: list[int]

    @property
    def tokens(self) -> int:
        """Tokens of the flat row."""
        return sum(self.pieces)

    @classmethod
    def of(cls, order: PrefixOrder) -> PrefixTree:
        """Lay out rows that are in the order of a dictionary."""
        paths: list[np.ndarray] = []
        path = np.empty(0, dtype=np.int64)  # of the row before
        ranges: list[tuple[int, int]] = []  # the same as ranges of indices
        runs: list[list[tuple[int, int]]] = []  # the ranges of each run's path; the last one ends with the run
        starts: list[int] = []
        end = 0
        for length, shared in zip(order.lengths, order.shared, strict=True):
            continues = bool(runs) and shared == len(path)  # the row before is a prefix of this one, so its run goes on
            path = np.concatenate([path[:shared], np.arange(end, end + length - shared)])
            ranges = _cut(ranges, shared)
            if length > shared:
                stop = end + length - shared
                if continues:
                    ranges = [*ranges[:-1], (ranges[-1][0], stop)]
                    runs[-1] = ranges
                else:
                    ranges = [*ranges, (end, stop)]
                    runs.append(ranges)
                    starts.append(end)
                end = stop
            paths.append(path)
        cuts = sorted({edge for run in runs for part in run for edge in part})
        pieces = [stop - start for start, stop in itertools.pairwise(cuts)]
        tree_runs = []
        for run, start in zip(runs, starts, strict=True):
            numbers = [n for a, b in run for n in range(bisect.bisect_left(cuts, a), bisect.bisect_left(cuts, b))]
            stop = run[-1][1]
            before = sum(b - a for a, b in run) - (stop - start)
            tree_runs.append(Run(start, stop, before, tuple(numbers)))
        return cls(paths, tree_runs, pieces)


def _cut(ranges: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The first tokens of a path."""
    prefix = []
    for start, stop in ranges:
        if length <= 0:
            break
        prefix.append((start, min(stop, start + length)))
        length -= stop - start
    return prefix


def partition(
    order: PrefixOrder,
    size: int,
    budget: int | None,
    preferred: int,
    overhead: int,
    cost: Callable[[int], float] = float,
    together: int = 1,
) -> list[list[int]]:
    """Cut sorted rows into micro-batches, so that little is computed twice.

    A cut within a family of rows costs the tokens that they share. Of all ways to cut, this is the one with the least
    cost of tokens and passes; of several, the one whose micro-batches are most equal.

    Args:
        size: the most rows of a micro-batch.
        budget: the most tokens of its tree; a longer row gets a micro-batch of its own.
        preferred: tokens above which a larger micro-batch computes no faster; a family may exceed it.
        overhead: tokens that cost as much as another pass through the model.
        cost: of a row by its number of tokens, attention included, in units of a token without attention.
        together: the number of consecutive rows that are not separated; they may exceed a limit.
    """
    count = len(order.rows)
    new, shared = _summed(order, float)
    new_cost, shared_cost = _summed(order, cost)
    balance = 0.25 / max(1.0, sum(map(cost, order.lengths))) ** 2  # the sum of squares only breaks ties
    best, begin = np.zeros(count + 1), [0] * (count + 1)
    for stop in range(together, count + 1, together):
        starts = np.arange(max(0, stop - max(1, size // together) * together), stop, together)
        # Tokens of rows [i, stop): the first row as a whole, of the others what is new.
        tokens = new[stop] - new[starts] + shared[starts]
        costs = new_cost[stop] - new_cost[starts] + shared_cost[starts]
        total = costs + overhead + 0.25 * np.maximum(0.0, tokens - preferred) + balance * costs**2 + best[starts]
        if budget is not None:
            total[:-1][tokens[:-1] > budget] = np.inf
        index = int(total.argmin())
        best[stop], begin[stop] = total[index], int(starts[index])
    groups = []
    stop = count
    while stop:
        groups.append(order.rows[begin[stop] : stop])
        stop = begin[stop]
    return groups[::-1]


def even_partition(
    order: PrefixOrder,
    count: int,
    size: int,
    budget: int | None,
    cost: Callable[[int], float] = float,
    together: int = 1,
) -> list[list[int]] | None:
    """Cut sorted rows into at most `count` micro-batches, of which the most expensive one is as cheap as it can be.

    Args:
        size, budget, cost, together: see `partition`.

    Returns:
        The rows of each; None if limits do not allow so few.
    """
    of_rows = [*map(cost, order.lengths)]
    low, high = max(of_rows, default=0.0), sum(of_rows)
    tokens, costs = _summed(order, float), _summed(order, cost)
    groups = _filled_up(order.rows, tokens, costs, size, budget, high, together)
    if len(groups) > count:
        return None
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        candidate = _filled_up(order.rows, tokens, costs, size, budget, middle, together)
        if len(candidate) > count:
            low = middle
        else:
            groups, high = candidate, middle
    return groups


def _filled_up(
    rows: list[int],
    of_tokens: tuple[np.ndarray, np.ndarray],
    of_costs: tuple[np.ndarray, np.ndarray],
    size: int,
    budget: int | None,
    most: float,
    together: int,
) -> list[list[int]]:
    """Micro-batches that each take rows as long as they stay within the limits and cost no more than `most`.

    Args:
        of_tokens, of_costs: tokens and costs of sorted rows as `_summed` gives them.
    """
    groups: list[list[int]] = []
    tokens, group_cost = 0, 0.0
    (new, shared), (new_cost, shared_cost) = of_tokens, of_costs
    for start in range(0, len(rows), together):
        stop = start + together
        more, costs = int(new[stop] - new[start]), float(new_cost[stop] - new_cost[start])
        fits = budget is None or tokens + more <= budget
        if groups and len(groups[-1]) + together <= size and fits and group_cost + costs <= most:
            groups[-1] += rows[start:stop]
            tokens, group_cost = tokens + more, group_cost + costs
        else:
            groups.append(rows[start:stop])
            tokens, group_cost = more + int(shared[start]), costs + float(shared_cost[start])
    return groups


def _summed(order: PrefixOrder, cost: Callable[[int], float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the total cost of the new tokens of all rows before each place, and of each row's shared prefix.

    The shared prefix of a row is the one that it has in common with the row before.
    """
    shared = np.array([cost(length) for length in order.shared], dtype=np.float64)
    own = np.array([cost(length) for length in order.lengths], dtype=np.float64)
    return np.concatenate([[0.0], (own - shared).cumsum()]), shared
