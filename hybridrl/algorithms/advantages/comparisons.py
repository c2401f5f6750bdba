"""Estimators from comparisons of the samples of one prompt: how often a sample wins.

Legend: B samples, R_i the summed reward of sample i, g its group of n samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.advantages.outcome_rewards import outcome_estimator
from hybridrl.algorithms.config_access import setting
from hybridrl.algorithms.functional import rounding_of, without_rounding
from hybridrl.algorithms.groups import Groups
from hybridrl.settings import key


@dataclass(frozen=True)
class SPPOSettings:
    """Settings of `sppo`, keys of `algorithm`."""

    sppo_preference_scale: float | None = key(
        None,
        "sppo: a sample wins with probability sigmoid(scale * difference of scores); null: if it scores more",
        gt=0,
    )


def win_rates(scores: Tensor, groups: Groups, scale: float | None = None) -> Tensor:
    """Mean over the samples j of a group, i among them, of P(i wins against j), [B] -> [B].

    Args:
        scale: P = sigmoid(scale (R_i - R_j)); None: 1 if R_i is larger, 1/2 if they are equal.
    """
    order = torch.argsort(groups.ids, stable=True)
    sizes = groups.sizes.long()
    starts = sizes.cumsum(0) - sizes
    rows = groups.ids[order]
    columns = torch.arange(len(order), device=scores.device) - starts[rows]
    table = scores.new_full((groups.count, int(sizes.max()) if len(sizes) else 0), torch.nan)
    table[rows, columns] = scores[order]
    difference = table[:, :, None] - table[:, None, :]  # NaN where a group has fewer samples
    if scale is None:
        # Sums of the same rewards over different tokens may differ by rounding.
        largest = torch.maximum(table[:, :, None].abs(), table[:, None, :].abs())
        wins = (without_rounding(difference, rounding_of(largest, torch.float32)).sign() + 1) / 2
    else:
        wins = torch.sigmoid(scale * difference)
    rates = torch.empty_like(scores)
    wins = torch.where(difference.isnan(), torch.nan, wins)  # the sign of NaN is 0
    rates[order] = wins.nanmean(dim=2)[rows, columns]
    return rates


@outcome_estimator("sppo", compares_samples=True, settings=SPPOSettings)
def compute_sppo_advantage(scores: Tensor, groups: Groups, config: object = None) -> Tensor:
    """SPPO (Wu et al. 2024, arXiv 2405.00675, eq. 4.6): A_i = P(i wins against the policy) - 1/2.

    The probability is estimated by the n samples of the group, i among them. It lies in [-1/2, 1/2] and is 0 for a
    group whose samples all score the same. It is made for the policy loss `sppo`.
    """
    scale = setting(config, "sppo_preference_scale", None, who="sppo", root="algorithm")
    return win_rates(scores, groups, scale) - 0.5
