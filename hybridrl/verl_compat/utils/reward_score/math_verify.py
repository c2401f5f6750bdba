"""`verl.utils.reward_score.math_verify`."""

from hybridrl.reward.score.math_verify import compute_score

__all__ = ["compute_score"]
