"""Cross-checks of `algorithm` and the losses: valid settings that conflict with each other."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.config.entry_settings import engine_group, engine_settings, fault_of_name, other_places
from hybridrl.config.roles import POLICY, REFERENCE, ROLES, pool_of
from hybridrl.config.schema.root import PPOTrainerConfig
from hybridrl.errors import ModelError
from hybridrl.registry import ADV_ESTIMATORS, POLICY_LOSSES, Registry, import_external_lib

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"


def check_names(
    where: str, external_lib: str | None, choices: Mapping[str, tuple[Registry[Any], str]]
) -> Iterator[str]:
    """Check the names of estimators, losses, managers and engines, after the user's modules have registered theirs.

    Args:
        where: the prefix of `model.external_lib` in the tree.
        external_lib: the value of `model.external_lib`.
        choices: for each key, the registry and the name that is chosen from it.
    """
    try:
        import_external_lib(external_lib)
    except ModelError as error:
        yield f"{where}{error}"
        return
    for key, (registry, name) in choices.items():
        if (fault := fault_of_name(registry, name, key, f"{where}model.external_lib")) is not None:
            yield fault


def check_estimator(config: PPOTrainerConfig) -> Iterator[str]:
    name, policy_loss = config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss
    metadata = ADV_ESTIMATORS.metadata(name)
    for required in POLICY_LOSSES.metadata(policy_loss.loss_mode).requires:
        if policy_loss[required] is None:
            where = f"{_ACTOR}.policy_loss"
            yield f"{where}.loss_mode={policy_loss.loss_mode} without {where}.{required}; set it"
    samples = config.actor_rollout_ref.rollout.n
    if POLICY_LOSSES.metadata(policy_loss.loss_mode).compares_samples:
        yield from _check_comparing_loss(config)
    if samples < metadata.fewest_samples and not (metadata.alone and samples == 1):
        needed = metadata.fewest_samples
        yield (
            f"algorithm.adv_estimator={name} compares the samples of a prompt with each other and has no advantage for "
            f"{'a single one' if needed == 2 else f'less than {needed}'}, and {_ROLLOUT}.n={samples}; set it to "
            f"{needed} or more, 8 is usual"
        )
    if "values" in metadata.needs and not config.use_critic:
        yield f"algorithm.adv_estimator={name} needs values, and critic.enable=False; leave it null, or use grpo"
    if config.algorithm.filter_groups.metric == "seq_final_reward":
        yield (
            "algorithm.filter_groups.metric=seq_final_reward: groups are filtered before rewards are changed by a KL "
            "penalty or normalised; use score, the summed score that the reward manager gives"
        )
    if config.algorithm.filter_groups.enable and samples == 1:
        yield (
            f"algorithm.filter_groups.enable=True drops prompts whose samples all score the same, and {_ROLLOUT}.n=1: "
            "all would be dropped; set it to 2 or more, 8 is usual"
        )


def check_tracked_values(config: PPOTrainerConfig) -> Iterator[str]:
    """Check that the rewards of an estimator that tracks the value of prompts stay those of the reward function."""
    algorithm = config.algorithm
    if "prompt_values" not in ADV_ESTIMATORS.metadata(algorithm.adv_estimator).needs:
        return
    takes = f"algorithm.adv_estimator={algorithm.adv_estimator} tracks rewards from 0 to 1 of each prompt, which"
    if algorithm.use_kl_in_reward:
        yield f"{takes} algorithm.use_kl_in_reward=True changes; use {_ACTOR}.use_kl_loss=True in its place"
    if algorithm.normalize_rewards != "none":
        yield f"{takes} algorithm.normalize_rewards={algorithm.normalize_rewards} changes; set it to none"


def _check_comparing_loss(config: PPOTrainerConfig) -> Iterator[str]:
    where = f"{_ACTOR}.policy_loss.loss_mode={config.actor_rollout_ref.actor.policy_loss.loss_mode}"
    if config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{where} compares the samples of a prompt with each other, and {_ROLLOUT}.n=1: it would never change a "
            "weight; set it to 2 or more, 8 is usual"
        )
    if config.algorithm.use_pf_ppo:
        yield (
            f"{where} compares the samples of a prompt with each other, and algorithm.use_pf_ppo=True draws single "
            "rows without the others of their prompts; set it to False, or use another loss"
        )


def check_rewards_to_advantages(config: PPOTrainerConfig) -> Iterator[str]:
    """Check the controller of the KL coefficient, and the components that `gdpo` reads in place of the reward."""
    algorithm, keys, weights = config.algorithm, config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    control, rows = algorithm.kl_ctrl, config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    ahead = math.ceil(config.trainer.v1.staleness)
    until_seen = rows * (1 + ahead)  # samples, before the first of them that a change of the coefficient has acted on
    if algorithm.use_kl_in_reward and control.type == "adaptive" and until_seen >= 5 * control.horizon:
        steps = f", and its effect is seen {ahead + 1} steps later (trainer.v1)" if ahead else ""
        yield (
            f"algorithm.kl_ctrl.horizon={control.horizon}: a step of {rows} samples (data.train_batch_size x "
            f"{_ROLLOUT}.n) would change the coefficient by a factor of 1 - 0.2 x {rows} / {control.horizon}{steps}. "
            f"Until then, the changes leave nothing of it; set horizon above {until_seen // 5}, {10 * until_seen} "
            "changes it by 2 %"
        )
    name = algorithm.adv_estimator
    if not ADV_ESTIMATORS.metadata(name).reads_components:
        return
    if weights is not None and len(weights) != len(keys):
        yield f"algorithm.gdpo_reward_weights={weights} and gdpo_reward_keys={keys}: one weight for each key"
    takes = f"algorithm.adv_estimator={name} takes the components of gdpo_reward_keys, not the reward that"
    if algorithm.use_kl_in_reward:
        yield f"{takes} algorithm.use_kl_in_reward=True changes; use {_ACTOR}.use_kl_loss=True in its place"
    if algorithm.normalize_rewards != "none":
        yield f"{takes} algorithm.normalize_rewards={algorithm.normalize_rewards} changes; set it to none"
    if algorithm.clip_rewards is not None:
        yield f"{takes} algorithm.clip_rewards={algorithm.clip_rewards} changes; set it to null"
    buffer = config.reward.reward_kwargs.get("overlong_buffer_cfg")
    if isinstance(buffer, dict) and buffer.get("enable") is True:
        yield (
            f"{takes} reward.reward_kwargs.overlong_buffer_cfg penalises; disable it, and return a component for the "
            "length from your reward function"
        )


def _check_alike(where: str, actor: Any, ref: Any) -> Iterator[str]:
    """Check that two engines can compare their logits of a micro-batch."""
    why = f"{where}=full compares both policies on the same micro-batches"
    if actor.strategy != ref.strategy:
        yield f"{why}, so actor_rollout_ref.ref.strategy={ref.strategy} must be {_ACTOR}.strategy={actor.strategy}"
        return
    own, other, group = engine_settings(actor), engine_settings(ref), engine_group(actor)
    for name in [*(["dtype"] if own.dtype != other.dtype else []), *other_places(own, other)]:
        yield (
            f"{why}, and {_ACTOR}.{group}.{name}={getattr(own, name)} differs from "
            f"actor_rollout_ref.ref.{group}.{name}={getattr(other, name)}; set them alike"
        )


def check_full_kl(config: PPOTrainerConfig) -> Iterator[str]:
    """Check that the KL over the vocabulary can be computed: the actor's process needs the logits of both policies."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    in_reward = algorithm.use_kl_in_reward and algorithm.kl_penalty == "full"
    where = "algorithm.kl_penalty" if in_reward else f"{_ACTOR}.kl_loss_type"
    own, other = pool_of(ROLES[POLICY], config), pool_of(ROLES[REFERENCE], config)
    if not in_reward and not (actor.use_kl_loss and actor.kl_loss_type == "full"):
        return
    if config.has_reference_model and other != own:
        yield (
            f"{where}=full compares the logits of both policies, too large to send between processes, and the "
            f"reference's pool {other} is not the actor's {own}; remove placement.roles.ref, or use low_var_kl"
        )
    if config.has_reference_model:
        yield from _check_alike(where, actor, config.actor_rollout_ref.ref)
    if in_reward and algorithm.rollout_correction.bypass_mode:
        yield (
            "algorithm.kl_penalty=full is computed in the pass over old log-probabilities, which "
            "algorithm.rollout_correction.bypass_mode=True spares; use kl_penalty=kl, or bypass_mode=False"
        )
