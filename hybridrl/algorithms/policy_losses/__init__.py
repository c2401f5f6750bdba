"""Policy losses: from log-probabilities and advantages to (loss, metrics).

Importing this package imports every module in it, and so registers all of them (`actor.policy_loss.loss_mode`). A
loss is a function of the tokens and its settings, decorated with `tokens.policy_loss`, which gives it the signature
(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights).

- All tensors are [B, T] of one micro-batch on one rank. The loss is its share of the whole mini-batch's loss.
- `config` is the actor's settings, any object with attributes.
- The counts of the whole mini-batch come as the keyword `counts`: a dict with any of `dp_size`,
  `batch_num_tokens`, `global_batch_size` and `loss_scale_factor`, as `agg_loss` takes them. Without it those of
  `config.global_batch_info` are used, where verl puts them, and without these the call's own.
- `rollout_is_weights` multiply each token's loss.
- Metrics are detached 0-dim tensors, each a mean over the micro-batch's response tokens: weighting them by token counts
  merges them exactly.
- NaN under a zero mask reaches neither the loss nor a gradient.
- A loss whose tokens are chosen over the whole mini-batch takes the choice as the keyword `prepared`; see
  `covariance`.
"""

from hybridrl.algorithms.registry import import_modules

_functions = import_modules(__name__, __path__, "compute_policy_loss")
globals().update(_functions)
__all__ = sorted(_functions)
