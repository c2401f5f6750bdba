"""Sums over whole sequences, for losses that see only some rows of a sequence.

A sequence is a row, or the rows of one session (`algorithms.sessions`). Rows of a session may be in several
micro-batches and on several ranks. A loss that needs a sum over all tokens of a sequence, such as that of log rho, asks
a `Sequences` for it. Where sequences have several rows, the loss is called twice:

1. Before the update, without gradients, on the rows of a rank, with a `RowTotals`, which keeps what each row adds.
   `other_rows` finds, from the rows of all ranks, what the other rows of a row's sequence add.
2. In the update, on a micro-batch, with a `SplitSequences` of these numbers. Sums then have the value of the whole
   sequence, and the gradient with respect to the tokens of the row itself.

Both calls ask for the same sums in the same order, and no sum is of values that depend on another one.

Legend: b rows of a call, T response tokens, k sums; B rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridrl.algorithms.groups import Groups
from hybridrl.errors import AlgorithmError


class Sequences:
    """Sums over the tokens of sequences. Here each row is a sequence."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum over each row's sequence: [b, T] -> [b, 1]."""
        return values.sum(-1, keepdim=True)

    def max(self, values: Tensor) -> Tensor:
        """The largest value of each row's sequence: [b, T] -> [b, 1]; values are at least 0."""
        return values.amax(-1, keepdim=True)


class RowTotals(Sequences):
    """Keeps what each row adds to its sequence.

    Attributes:
        partials: [b] for each call, in the order of calls.
        kinds: the method of each call, `sum` or `max`.
    """

    def __init__(self) -> None:
        self.partials: list[Tensor] = []
        self.kinds: list[str] = []

    def sum(self, values: Tensor) -> Tensor:
        return self._record("sum", super().sum(values))

    def max(self, values: Tensor) -> Tensor:
        return self._record("max", super().max(values))

    def _record(self, kind: str, total: Tensor) -> Tensor:
        self.partials.append(total.detach().squeeze(-1))
        self.kinds.append(kind)
        return total


def other_rows(totals: Tensor, kinds: Sequence[str], ids: Tensor) -> Tensor:
    """Compute what the other rows of each row's sequence add to its sums.

    Args:
        totals: [B, k] what each row adds, from `RowTotals`, of all rows of the sequences.
        kinds: of the k sums.
        ids: [B] the sequence of each row.

    Returns:
        [B, k] in float64: a sum over the other rows; of a `max` the largest value of the sequence.
    """
    groups, totals = Groups(ids, totals.device), totals.double()
    rest = groups.sum(totals)[groups.ids] - totals
    for column, kind in enumerate(kinds):
        if kind == "max":
            rest[:, column] = groups.extremes(totals[:, column])[1][groups.ids]
    return rest


class SplitSequences(Sequences):
    """Rows whose sequences have other rows elsewhere.

    Args:
        others: [b, k], the rows' part of what `other_rows` returned.
    """

    def __init__(self, others: Tensor) -> None:
        self._others = iter(others.unbind(1))

    def sum(self, values: Tensor) -> Tensor:
        own = super().sum(values)
        return own + self._next(own)

    def max(self, values: Tensor) -> Tensor:
        own = super().max(values)
        return torch.maximum(own, self._next(own))

    def _next(self, own: Tensor) -> Tensor:
        others = next(self._others, None)
        if others is None:
            raise AlgorithmError("the loss asks for more sums over sequences than in the pass before the update.")
        return others[:, None].to(own.dtype)


class WholeSequences(Sequences):
    """All rows of each sequence are in the call.

    Args:
        ids: [b] the sequence of each row.
    """

    def __init__(self, ids: Tensor) -> None:
        self._groups = Groups(ids, ids.device)

    def sum(self, values: Tensor) -> Tensor:
        return self._groups.sum(super().sum(values))[self._groups.ids]

    def max(self, values: Tensor) -> Tensor:
        return self._groups.extremes(super().max(values).squeeze(-1))[1][self._groups.ids, None]


class UnknownSequences(Sequences):
    """Sequences may have several rows, and what the other rows add is not known.

    Args:
        who: the function that asks, for the message.
    """

    def __init__(self, who: str) -> None:
        self.who = who

    def sum(self, values: Tensor) -> Tensor:
        raise AlgorithmError(
            f"{self.who} needs sums over whole sequences, and sequences have several rows here (sequence_lengths), of "
            "which this call may hold a part. A loss of the actor gets them if it is registered with "
            "whole_sequences=True; a loss of distillation does not: use distillation_loss.policy_loss_mode=vanilla, or "
            "an agent loop that returns one trajectory for a session."
        )

    max = sum


def sequences_of(sequences: Sequences | None, several_rows: bool, who: str) -> Sequences:
    """Return the sums that a loss reads: those passed to it, else those of its rows, if each is a whole sequence."""
    if sequences is not None:
        return sequences
    return UnknownSequences(who) if several_rows else Sequences()
