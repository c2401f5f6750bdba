"""Estimators that compare the samples of one prompt with each other.

Legend: B samples, T response tokens; R_i = sum of the rewards on sample i's response tokens; g its group (same
``index``) of n samples. Every estimator here gives all tokens of a sample the same advantage A_i and returns it twice,
as advantages and as returns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from hybridrl.algorithms.groups import group_samples, outcome_scores, spread
from hybridrl.algorithms.registry import AdvantageEstimator, register_adv_est


@register_adv_est(AdvantageEstimator.GRPO)
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2): A_i = (R_i - mean_g R) / (std_g R + epsilon).

    The standard deviation is the unbiased one. A group of one is not centred: A_i = R_i / (1 + epsilon).
    With ``norm_adv_by_std_in_grpo=False`` there is no division: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), which
    removes the weight that easy and hard prompts get from a small spread.

    Args:
        token_level_rewards, response_mask: [B, T].
        index: [B] prompt ids (``uid``); samples of a group may stand anywhere.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: see above (``algorithm.norm_adv_by_std_in_grpo``).
        config: not read; the flag decides.

    Returns:
        (advantages, returns): the same [B, T] twice.
    """
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = group_samples(index, scores)
    centred = scores - (groups.size > 1) * groups.mean(scores)
    if norm_adv_by_std_in_grpo:
        centred = centred / (groups.std(scores) + epsilon)
    advantages = spread(centred, token_level_rewards, response_mask)
    return advantages, advantages


# The computation is vectorised anyway: two names, one function.
compute_grpo_vectorized_outcome_advantage = register_adv_est(AdvantageEstimator.GRPO_VECTORIZED)(
    compute_grpo_outcome_advantage
)
