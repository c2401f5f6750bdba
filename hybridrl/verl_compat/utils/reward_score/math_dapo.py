"""`verl.utils.reward_score.math_dapo`."""

from hybridrl.reward.score.math_dapo import compute_score

__all__ = ["compute_score"]
