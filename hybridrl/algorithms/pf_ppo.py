"""Policy filtration (PF-PPO): resampling a batch towards trajectories with informative rewards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.groups import outcome_scores
from hybridrl.errors import AlgorithmError

PF_PPO_METHODS = ("pow", "max_min", "max_random")


def pf_ppo_weights(scores: Tensor, reweight_method: str = "pow", weight_pow: float = 2.0) -> Tensor:
    """Compute the unnormalised sampling weight of each trajectory (Shen et al. 2024, arXiv 2409.06957), [B] -> [B].

        pow          |R|^weight_pow
        max_min      1 where R is the batch's largest or smallest, 0 elsewhere
        max_random   0.4 where R is the largest, 0.1 elsewhere

    Each weight is at least 1e-8, so that a batch of zeros is sampled uniformly.

    Raises:
        AlgorithmError: the method is unknown, or the power is not positive.
    """
    if reweight_method == "pow":
        if not weight_pow > 0:
            raise AlgorithmError(f"algorithm.pf_ppo.weight_pow is {weight_pow}; it must be greater than 0.")
        weights = scores.abs() ** weight_pow
    elif reweight_method == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype)
    elif reweight_method == "max_random":
        weights = torch.where(scores == scores.max(), 0.4, 0.1).to(scores.dtype)
    else:
        raise AlgorithmError(
            f"algorithm.pf_ppo.reweight_method is {reweight_method!r}; choose from {', '.join(PF_PPO_METHODS)}."
        )
    return (weights + 1e-8).clamp(min=1e-8)


def compute_pf_ppo_reweight_data(
    data: Any, reweight_method: str = "pow", weight_pow: float = 2.0, generator: torch.Generator | None = None
) -> Any:
    """Draw a batch of the same size with replacement, weighted by `pf_ppo_weights`.

    Whole rows are drawn: a trajectory keeps its own advantages, returns and uid. Resample only after the advantages are
    estimated, because resampling changes their groups.

    Args:
        data: a DataProto with `token_level_scores` and `response_mask` [B, T].
        reweight_method, weight_pow: `algorithm.pf_ppo`.
        generator: source of randomness; torch's default generator if None.

    Raises:
        AlgorithmError: scores are not finite, or settings are out of range.
    """
    scores = outcome_scores(data.batch["token_level_scores"], data.batch["response_mask"])
    weights = pf_ppo_weights(scores, reweight_method, weight_pow)
    return data.select_idxs(torch.multinomial(weights, len(weights), replacement=True, generator=generator))
