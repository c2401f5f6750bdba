"""Requirements of a run's settings on its models, computed once before anything runs."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from hybridrl.algorithms import call_policy_loss, compute_rollout_correction_and_rejection_mask, named_inputs
from hybridrl.algorithms.rollout_correction.apply import correction_settings
from hybridrl.config import PPOTrainerConfig
from hybridrl.registry import POLICY_LOSSES
from hybridrl.trainer.ppo.advantage import check_estimator
from hybridrl.workers.losses import FULL_KL, PolicyLoss


@dataclass(frozen=True)
class RunRequirements:
    """The results that a run computes for each batch.

    Attributes:
        critic: a value model takes part; see `PPOTrainerConfig.use_critic`.
        reference: a reference policy takes part; see `PPOTrainerConfig.use_reference`.
        reference_in_policy: the reference is the policy without its adapter; see `PPOTrainerConfig`.
        old_log_probs: the actor computes log-probabilities once before the first update of a batch. With one update
            per batch the policy that is updated is the one that sampled, so its detached current log-probabilities
            are the old ones and the pass is skipped; `actor.recompute_old_log_prob=always` never skips it, nor does
            asynchronous training, whose responses may be older. A KL
            penalty in the reward, some estimators, a correction of the sampler's probabilities and router replay R2
            need them before the update. In bypass mode the sampler's log-probabilities replace them.
        ref_log_prob: the reference computes log-probabilities of the sampled tokens. Every KL form except `full`
            reads them, and so does a policy loss that is registered to need them.
        ref_kl: the reward needs the KL over the vocabulary. The actor computes it along with its old
            log-probabilities.
        values: the estimator reads the critic's values.
        reward_baselines: the estimator compares with a greedy response to each prompt.
        teacher: teachers compute before the update what the distillation loss reads. A loss over the vocabulary is
            computed in the update.
        prompt_values: the estimator compares with the value of each prompt, which is tracked over the run.
        sampled_experts: the policy's pass and updates use the experts that tokens chose in generation.
    """

    critic: bool
    reference: bool
    reference_in_policy: bool
    old_log_probs: bool
    ref_log_prob: bool
    ref_kl: bool
    values: bool
    reward_baselines: bool
    sampled_experts: bool
    prompt_values: bool = False
    teacher: bool = False

    @classmethod
    def of(cls, config: PPOTrainerConfig) -> "RunRequirements":
        """Derive the needs from the settings and from the inputs that the estimator names."""
        actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
        inputs = named_inputs(algorithm.adv_estimator)
        loss_needs = POLICY_LOSSES.metadata(actor.policy_loss.loss_mode).needs
        full_in_reward = algorithm.use_kl_in_reward and algorithm.kl_penalty == FULL_KL
        full_in_loss = actor.use_kl_loss and actor.kl_loss_type == FULL_KL
        return cls(
            critic=config.use_critic,
            reference=config.use_reference,
            reference_in_policy=config.use_reference and not config.has_reference_model,
            old_log_probs="old_log_probs" in loss_needs or _old_log_probs(config, inputs),
            ref_log_prob=(algorithm.use_kl_in_reward and not full_in_reward)
            or (actor.use_kl_loss and not full_in_loss)
            or "ref_log_prob" in loss_needs,
            ref_kl=full_in_reward,
            values="values" in inputs,
            reward_baselines="reward_baselines" in inputs,
            prompt_values="prompt_values" in inputs,
            teacher=config.distillation.enabled and config.distillation.reads != "vocabulary",
            sampled_experts=actor.router_replay.records_in_generation,
        )


def _old_log_probs(config: PPOTrainerConfig, inputs: frozenset[str]) -> bool:
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    if actor.router_replay.records_in_pass:  # the pass records what the updates replay
        return True
    if actor.recompute_old_log_prob == "always" or inputs & {"old_log_probs", "sum_pi_squared"}:
        return True
    if correction.bypass_mode:
        return False
    on_policy = not config.trainer.v1.staleness
    one_update = on_policy and actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= config.data.train_batch_size
    corrects = correction.rollout_is is not None or correction.rollout_rs is not None
    return not one_update or config.algorithm.use_kl_in_reward or corrects


def check_algorithm(config: PPOTrainerConfig) -> None:
    """Try out the estimator, policy loss and rollout correction, as far as possible without a model.

    Raises:
        AlgorithmError: an unknown name, an input that nothing provides, or a setting out of its range. The error names
            it.
    """
    check_estimator(config)
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    loss = PolicyLoss.of(actor, correction)
    two = torch.full((1, 2), -1.0)  # a response of two tokens, on which every setting is read
    compute_rollout_correction_and_rejection_mask(two, two, torch.ones(1, 2), **correction_settings(correction))
    settings = SimpleNamespace(**{name: getattr(loss.settings, name) for name in actor.keys()})
    settings.policy_loss = loss.settings.policy_loss
    call_policy_loss(
        loss.mode,
        counts={"dp_size": 1, "batch_num_tokens": 2, "global_batch_size": 1, "loss_scale_factor": 2},
        old_log_prob=two,
        log_prob=two,
        advantages=two,
        response_mask=torch.ones(1, 2),
        loss_agg_mode=actor.loss_agg_mode,
        config=settings,
        rollout_is_weights=None,
        **dict.fromkeys(loss.needs, two),
        **({"group_ids": torch.zeros(1, dtype=torch.int64)} if loss.compares_samples else {}),
    )


def total_training_steps(config: PPOTrainerConfig, prompts_per_epoch: int) -> int:
    """Return `trainer.total_training_steps`, or the steps of `trainer.total_epochs` if no prompt is dropped."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return max(prompts_per_epoch * config.trainer.total_epochs // config.data.train_batch_size, 1)
