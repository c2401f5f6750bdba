"""Policy losses: they map log-probabilities and advantages to (loss, metrics).

Importing this package imports all its modules and thereby registers the losses (`actor.policy_loss.loss_mode`). A
loss is a function of the tokens and its settings, decorated with `tokens.policy_loss`, which gives it the signature
(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights).

- All tensors are [B, T] of one micro-batch on one rank. The loss is its share of the whole mini-batch's loss.
- `config` is the actor's settings, any object with attributes.
- The keyword `counts` holds the counts of the whole mini-batch: a dict with any of `dp_size`, `batch_num_tokens`,
  `global_batch_size` and `loss_scale_factor`, as `agg_loss` takes them. The default is `config.global_batch_info`,
  where verl puts them, and otherwise the call's own counts.
- Each token's loss is multiplied by its `rollout_is_weights`.
- Metrics are detached 0-dim tensors, each a mean over the micro-batch's response tokens. A mean weighted by token
  counts merges them exactly.
- NaN under a zero mask reaches neither the loss nor a gradient.
- A loss whose tokens are chosen over the whole mini-batch receives the choice as the keyword `prepared`; see
  `covariance`.
"""

from hybridrl.algorithms.algorithm_registry import import_modules

_functions = import_modules(__name__, __path__, "compute_policy_loss")
globals().update(_functions)
__all__ = sorted(_functions)
