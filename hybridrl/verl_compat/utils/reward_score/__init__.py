"""`verl.utils.reward_score`."""

from hybridrl.reward.score import default_compute_score

__all__ = ["default_compute_score"]
