"""`verl.utils.reward_score.prime_math`."""

from hybridrl.reward.score.prime_math import compute_score

__all__ = ["compute_score"]
