"""Policy losses: from log-probabilities and advantages to (loss, metrics).

Importing this package registers all of them (``actor.policy_loss.loss_mode``), each with the signature
(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights).

- All tensors are [B, T] of one micro-batch on one rank. The loss is its share of the whole mini-batch's loss.
- ``config`` is the actor's settings, any object with attributes. The counts of the whole mini-batch come with it as
  ``config.global_batch_info``: a dict with any of ``dp_size``, ``batch_num_tokens``, ``global_batch_size`` and
  ``loss_scale_factor``. Without it the local counts are used (`settings.with_global_batch_info` lays it over a config).
- ``rollout_is_weights`` multiply each token's loss.
- Metrics are detached 0-dim tensors, each a mean over the micro-batch's response tokens: weighting them by token counts
  merges them exactly.
- NaN under a zero mask reaches neither the loss nor a gradient.
- A loss whose tokens are chosen over the whole mini-batch takes the choice as the keyword ``prepared``; see
  `covariance`.
"""

from hybridrl.algorithms.policy_losses.bypass import compute_policy_loss_bypass_mode
from hybridrl.algorithms.policy_losses.covariance import compute_policy_loss_clip_cov, compute_policy_loss_kl_cov
from hybridrl.algorithms.policy_losses.dppo import compute_policy_loss_dppo_kl, compute_policy_loss_dppo_tv
from hybridrl.algorithms.policy_losses.sequence import compute_policy_loss_geo_mean, compute_policy_loss_gspo
from hybridrl.algorithms.policy_losses.soft import (
    compute_policy_loss_cispo,
    compute_policy_loss_dro,
    compute_policy_loss_gpg,
    compute_policy_loss_reinforce,
    compute_policy_loss_sapo,
)
from hybridrl.algorithms.policy_losses.vanilla import compute_policy_loss, compute_policy_loss_vanilla

__all__ = [
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
]
