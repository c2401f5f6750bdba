"""Advantage estimators: from rewards to (advantages, returns), both [B, T] and zero outside the response mask.

Importing this package registers all of them (`hybridrl.algorithms.registry`).
"""

from hybridrl.algorithms.advantages.gae import compute_gae_advantage_return
from hybridrl.algorithms.advantages.group_relative import (
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)
from hybridrl.algorithms.advantages.optimal_baseline import (
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
)
from hybridrl.algorithms.advantages.reinforce import (
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
)
from hybridrl.algorithms.advantages.scan import rewards_to_go

__all__ = [
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "rewards_to_go",
]
