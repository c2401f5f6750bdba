"""Policy filtration: resampling a batch towards trajectories whose reward says much (PF-PPO)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.groups import outcome_scores
from hybridrl.errors import AlgorithmError

PF_PPO_METHODS = ("pow", "max_min", "max_random")


def pf_ppo_weights(scores: Tensor, reweight_method: str = "pow", weight_pow: float = 2.0) -> Tensor:
    """How likely each trajectory is to be drawn (Shen et al. 2024, arXiv 2409.06957), [B] -> [B],
    unnormalised.

        pow          |R|^weight_pow
        max_min      1 where R is the batch's largest or smallest, 0 elsewhere
        max_random   0.4 where R is the largest, 0.1 elsewhere

    At least 1e-8 each, so that a batch of zeros is drawn from evenly.

    Raises:
        AlgorithmError: an unknown method, or a power that is not positive.
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
            f"algorithm.pf_ppo.reweight_method is {reweight_method!r}; known are {', '.join(PF_PPO_METHODS)}."
        )
    return (weights + 1e-8).clamp(min=1e-8)


def compute_pf_ppo_reweight_data(
    data: Any, reweight_method: str = "pow", weight_pow: float = 2.0, generator: torch.Generator | None = None
) -> Any:
    """A batch of the same size drawn with replacement by `pf_ppo_weights`.

    Whole rows are drawn: a trajectory keeps its own advantages, returns and uid. Draw after the advantages are
    estimated, whose groups the draw would otherwise change.

    Args:
        data: a DataProto with `token_level_scores` and `response_mask` [B, T].
        reweight_method, weight_pow: `algorithm.pf_ppo`.
        generator: source of randomness; torch's own when None.

    Raises:
        AlgorithmError: scores that are not finite, settings out of range.
    """
    scores = outcome_scores(data.batch["token_level_scores"], data.batch["response_mask"])
    weights = pf_ppo_weights(scores, reweight_method, weight_pow)
    return data.select_idxs(torch.multinomial(weights, len(weights), replacement=True, generator=generator))
