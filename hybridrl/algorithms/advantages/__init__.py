"""Advantage estimators: from rewards to (advantages, returns), both [B, T] and zero outside the response mask.

Importing this package registers all of them (`hybridrl.algorithms.registry`).
"""

from hybridrl.algorithms.advantages.gae import compute_gae_advantage_return
from hybridrl.algorithms.advantages.group_relative import (
    compute_grpo_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
)

__all__ = [
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
]
