"""`verl.utils.reward_score.geo3k`."""

from hybridrl.reward.score.geo3k import compute_score

__all__ = ["compute_score"]
