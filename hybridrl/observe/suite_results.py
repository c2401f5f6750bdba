"""Results of a benchmark suite: pass@1, pass@k and maj@k with intervals, and how long responses are.

A row is a problem with several responses. With s scored responses of which c are right,

    pass@k of a row = 1 - C(s - c, k) / C(s, k)                                   (arXiv 2107.03374)
    maj@k of a row = whether the most frequent answer of its k responses is right (arXiv 2203.11171)

Of equally frequent answers each counts with an equal share. A response in which no answer can be read does not vote.

A suite's value is the mean over its rows, and its 95 % interval that of other problems of the same kind, by the
bootstrap over rows. Where all n rows are 0, or all are 1, the bootstrap would have no width, and the interval is
Wilson's: 0 to z^2 / (n + z^2), or n / (n + z^2) to 1, with z = 1.96. Responses without a score are in none of these; a
row with fewer than k scored responses has no pass@k and no maj@k.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hybridrl.observe.compare import interval
from hybridrl.observe.validation_metrics import pass_at_k

_Z = 1.959963984540054  # the 97.5 percentile of the normal distribution


@dataclass(frozen=True)
class Estimate:
    """A mean over rows with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass
class ScoredRow:
    """The responses to one problem.

    Attributes:
        right: of each scored response, whether it is right.
        votes: the answer of each, None where none can be read; empty where the scorer returns no answers.
        unscored: number of responses without a score.
        tokens: length of each response, where it is known.
        cut: of each response, whether it ended at the length limit.
    """

    right: list[bool] = field(default_factory=list)
    votes: list[str | None] = field(default_factory=list)
    unscored: int = 0
    tokens: list[int] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class SuiteResult:
    """The results of a suite.

    Attributes:
        suite: its name.
        rows: number of problems.
        responses: of all problems.
        unscored: responses without a score.
        k: responses per problem.
        pass_1, pass_k, maj_k: None where no row has what they need; the last two also with k = 1.
        mean_tokens, cut_share: mean length in tokens, and the share of responses that ended at the limit; None where
            lengths are not known.
    """

    suite: str
    rows: int
    responses: int
    unscored: int
    k: int
    pass_1: Estimate | None
    pass_k: Estimate | None
    maj_k: Estimate | None
    mean_tokens: float | None
    cut_share: float | None


def suite_result(suite: str, rows: Sequence[ScoredRow], k: int) -> SuiteResult:
    """Return the results of a suite with k responses per problem."""
    full = [row for row in rows if len(row.right) >= k]
    voting = [row for row in full if len(row.votes) == len(row.right)]
    tokens = [length for row in rows for length in row.tokens]
    cut = [ended for row in rows for ended in row.cut]
    return SuiteResult(
        suite,
        len(rows),
        sum(len(row.right) + row.unscored for row in rows),
        sum(row.unscored for row in rows),
        k,
        _estimate([float(np.mean(row.right)) for row in rows if row.right]),
        _estimate([pass_at_k(len(row.right), sum(row.right), k) for row in full]) if k > 1 else None,
        _estimate([majority_share(row.right, row.votes) for row in voting]) if k > 1 else None,
        float(np.mean(tokens)) if tokens else None,
        float(np.mean(cut)) if cut else None,
    )


def majority_share(right: Sequence[bool], votes: Sequence[str | None]) -> float:
    """Return the share of right answers among the most frequent ones: 0 or 1, or between them where several tie.

    Args:
        right: whether each response is right.
        votes: the answer of each; None: it has none.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [vote for vote, count in counts.items() if count == most]
    return float(np.mean([any(ok for ok, vote in zip(right, votes, strict=True) if vote == each) for each in winners]))


def _estimate(values: Sequence[float]) -> Estimate | None:
    if not values:
        return None
    array, count = np.asarray(values), len(values)
    if (array == 0).all():
        return Estimate(0.0, 0.0, _Z**2 / (count + _Z**2))
    if (array == 1).all():
        return Estimate(1.0, count / (count + _Z**2), 1.0)
    return Estimate(float(array.mean()), *interval(array))
