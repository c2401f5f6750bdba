"""`verl.utils.reward_score.math_reward`."""

from hybridrl.reward.score.math_reward import compute_score

__all__ = ["compute_score"]
