"""RL mathematics in pure torch. Each function implements one formula and cites its paper in the docstring.

Names and signatures are those of verl's `core_algos` and `rollout_corr_helper`; docs/algorithms.md lists each of
them with its formula, key and paper, and states where the numbers differ from verl's. This package does not import Ray,
torch.distributed or the config tree. A `config` argument is any object with attributes.
"""

from typing import TYPE_CHECKING, Any

from hybridrl.algorithms.advantages import *  # noqa: F403 - the package's own __all__
from hybridrl.algorithms.advantages import __all__ as _advantages
from hybridrl.algorithms.advantages.outcome_rewards import outcome_estimator
from hybridrl.algorithms.aggregation import LOSS_AGG_MODES, agg_loss, compute_entropy_loss, global_counts
from hybridrl.algorithms.algorithm_registry import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    AdvantageEstimator,
    call_policy_loss,
    check_adv_inputs,
    estimate_advantages,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    get_policy_loss_prepare_fn,
    named_inputs,
    register_adv_est,
    register_policy_loss,
    required_inputs,
)
from hybridrl.algorithms.config_access import with_global_batch_info
from hybridrl.algorithms.diagnostics import explained_variance, group_health, length_reward_correlation
from hybridrl.algorithms.functional import (
    entropy_from_logits,
    full_kl_from_logits,
    logprobs_from_logits,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    sum_pi_squared_from_logits,
    token_statistics,
)
from hybridrl.algorithms.kl import (
    KL_PENALTIES,
    AdaptiveKLController,
    FixedKLController,
    KLController,
    compute_rewards,
    get_kl_controller,
    kl_penalty,
    kl_penalty_forward,
    penalise_rewards,
)
from hybridrl.algorithms.pf_ppo import PF_PPO_METHODS, compute_pf_ppo_reweight_data, pf_ppo_weights
from hybridrl.algorithms.policy_losses import *  # noqa: F403 - the package's own __all__
from hybridrl.algorithms.policy_losses import __all__ as _policy_losses
from hybridrl.algorithms.policy_losses.tokens import Tokens, policy_loss
from hybridrl.algorithms.rollout_correction import *  # noqa: F403 - the package's own __all__
from hybridrl.algorithms.rollout_correction import __all__ as _rollout_correction
from hybridrl.algorithms.value_loss import compute_value_loss
from hybridrl.errors import AlgorithmError

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "KL_PENALTIES",
    "LOSS_AGG_MODES",
    "PF_PPO_METHODS",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "AlgorithmError",
    "FixedKLController",
    "KLController",
    "Tokens",
    "agg_loss",
    "call_policy_loss",
    "check_adv_inputs",
    "compute_entropy_loss",
    "compute_pf_ppo_reweight_data",
    "compute_rewards",
    "compute_value_loss",
    "entropy_from_logits",
    "full_kl_from_logits",
    "estimate_advantages",
    "explained_variance",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "get_policy_loss_prepare_fn",
    "global_counts",
    "group_health",
    "kl_penalty",
    "kl_penalty_forward",
    "length_reward_correlation",
    "logprobs_from_logits",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "named_inputs",
    "penalise_rewards",
    "outcome_estimator",
    "pf_ppo_weights",
    "policy_loss",
    "register_adv_est",
    "register_policy_loss",
    "required_inputs",
    "sum_pi_squared_from_logits",
    "token_statistics",
    "with_global_batch_info",
    *_advantages,
    *_policy_losses,
    *_rollout_correction,
]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The functions that the modules of `advantages` and `policy_losses` define."""
