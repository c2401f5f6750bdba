r"""Whether samples are missing at random, and how far the mean reward of what is trained on may be off.

Legend: a step has attempts i at samples of prompts g; m_i = 1 if attempt i has no reward, else 0; v_i a value of the
attempt, its length or the mean reward of its prompt. p is the share of attempts without a reward.

If p(y), the probability that response y is missing, depends on y, training sees the distribution

    pi_J(y) = pi(y) (1 - p(y)) / (1 - p)        in place of pi(y), with p = E_pi p(y)

whether a missing sample is generated again or leaves its group. The total variation distance of the two is
`E_pi |p(y) - p| / (2 (1 - p))`, which is at most p, because `E |p(y) - p| <= 2 p (1 - p)` for p(y) in [0, 1]. The mean
under pi_J of any quantity with values in [a, b] is therefore off by at most `p (b - a)`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields

import numpy as np

#: fewest attempts without a reward, and fewest prompts, that a test is made with: the normal approximation needs some
FEWEST = 20


@dataclass
class Dependence:
    r"""Tests whether missing attempts have other values than the rest, over several steps.

    The statistic is the sum over steps of the covariance of m and v, both centred within the step, so that values that
    drift during training do not matter. Its variance is estimated by the squares of the sums of each prompt, which
    remains right where attempts of one prompt are missing together, and where values vary more in some prompts:

        z = sum_g s_g / sqrt(sum_g s_g^2),      s_g = sum_{i in g} (m_i - mean m) (v_i - mean v)

    If attempts of a prompt are missing independently of their values, z is about normal.

    Attributes:
        total: sum of s_g.
        squares: sum of s_g^2.
        missing: attempts without a reward.
        prompts: number of prompts with a share in the sums.
    """

    total: float = 0.0
    squares: float = 0.0
    missing: int = 0
    prompts: int = 0

    def add(self, missing: Sequence[bool], values: Sequence[float], prompts: Sequence[Hashable]) -> None:
        """Add the attempts of a step.

        Args:
            missing: m_i.
            values: v_i.
            prompts: the prompt of each attempt.
        """
        m, v = np.asarray(missing, dtype=np.float64), np.asarray(values, dtype=np.float64)
        if not len(m) or m.min() == m.max() or v.min() == v.max():
            return  # such a step says nothing
        number_of = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        sums = np.bincount([number_of[prompt] for prompt in prompts], (m - m.mean()) * (v - v.mean()))
        self.total += float(sums.sum())
        self.squares += float((sums**2).sum())
        self.missing += int(m.sum())
        self.prompts += len(number_of)

    @property
    def z(self) -> float:
        """The statistic; 0 where there is too little to test."""
        if min(self.missing, self.prompts) < FEWEST or self.squares == 0:
            return 0.0
        return self.total / math.sqrt(self.squares)

    @property
    def p_value(self) -> float:
        """Probability of a z as far from 0, in either direction, if attempts are missing at random."""
        return math.erfc(abs(self.z) / math.sqrt(2))

    def state(self) -> dict[str, float]:
        """Everything, for a checkpoint."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks in [0, 1], the mean of equal values' ranks; so that a few long responses do not decide a test alone."""
    unique, place, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middle = ends - (counts + 1) / 2
    return middle[place] / max(len(values) - 1, 1) if len(unique) else np.zeros(0)


def bias_bound(missing: int, attempts: int, lowest: float, largest: float) -> float:
    """The largest possible distance between the mean reward of judged samples and that of all: p (b - a).

    See the module for the derivation. It holds for all missing rewards in [lowest, largest].
    """
    return missing / attempts * (largest - lowest) if attempts else 0.0
