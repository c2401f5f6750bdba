"""What the controller reads out of the settings before anything runs: what must be computed, and what cannot work."""

from types import SimpleNamespace

import torch

from hybridrl.algorithms import compute_rollout_correction_and_rejection_mask, get_policy_loss_fn
from hybridrl.algorithms.rollout_correction.apply import correction_settings
from hybridrl.config import PPOTrainerConfig
from hybridrl.trainer.ppo.advantage import check_estimator, needs
from hybridrl.workers.losses import FULL_KL, PolicyLoss


def check_algorithm(config: PPOTrainerConfig) -> None:
    """Try out estimator, policy loss and rollout correction as far as that needs no model.

    Raises:
        AlgorithmError: an unknown name, an input that nothing provides, or a setting out of its range; it is named.
    """
    check_estimator(config)
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    loss = PolicyLoss.of(actor, correction)
    two = torch.full((1, 2), -1.0)  # a response of two tokens, on which every setting is read
    compute_rollout_correction_and_rejection_mask(two, two, torch.ones(1, 2), **correction_settings(correction))
    settings = SimpleNamespace(**{name: getattr(loss.settings, name) for name in actor.keys()})
    settings.policy_loss = loss.settings.policy_loss
    get_policy_loss_fn(loss.mode)(
        old_log_prob=two,
        log_prob=two,
        advantages=two,
        response_mask=torch.ones(1, 2),
        loss_agg_mode=actor.loss_agg_mode,
        config=settings,
    )


def needs_old_log_prob(config: PPOTrainerConfig) -> bool:
    """Whether log-probabilities are computed once before the first update of a batch.

    With one update a batch the policy that is updated is the one that sampled, so its detached current
    log-probabilities are the old ones and the extra pass can be spared; `actor.recompute_old_log_prob=always` takes it
    nevertheless. A KL penalty in the reward, some estimators and a correction of the sampler's probabilities need them
    early. In bypass mode the sampler's stand for them.
    """
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    if actor.recompute_old_log_prob == "always" or needs(config, "old_log_probs", "sum_pi_squared"):
        return True
    if correction.bypass_mode:
        return False
    one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= config.data.train_batch_size
    corrects = correction.rollout_is is not None or correction.rollout_rs is not None
    return not one_update or config.algorithm.use_kl_in_reward or corrects


def needs_ref_log_prob(config: PPOTrainerConfig) -> bool:
    """Whether the reference's log-probabilities of the sampled tokens are read: a KL form other than `full` is."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    in_reward = algorithm.use_kl_in_reward and algorithm.kl_penalty != FULL_KL
    return in_reward or (actor.use_kl_loss and actor.kl_loss_type != FULL_KL)


def needs_ref_kl(config: PPOTrainerConfig) -> bool:
    """Whether the reward needs the KL over the vocabulary, which the actor computes with its old log-probabilities."""
    return config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == FULL_KL


def total_training_steps(config: PPOTrainerConfig, prompts_per_epoch: int) -> int:
    """`trainer.total_training_steps`, or the steps of `trainer.total_epochs` if no prompt is dropped."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return max(prompts_per_epoch * config.trainer.total_epochs // config.data.train_batch_size, 1)
