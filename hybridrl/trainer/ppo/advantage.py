"""From scores to advantages: checks of the estimator's inputs, the KL penalty in the reward, estimation, and PF-PPO."""

import hashlib
import json
from typing import Any

import torch

from hybridrl.algorithms import (
    check_adv_inputs,
    compute_pf_ppo_reweight_data,
    estimate_advantages,
    explained_variance,
    masked_var,
    penalise_rewards,
    rewards_to_go,
)
from hybridrl.algorithms.config_access import ConfigView
from hybridrl.algorithms.groups import outcome_scores
from hybridrl.algorithms.prompt_values import PromptValues
from hybridrl.algorithms.sessions import sessions_of
from hybridrl.config import AlgorithmConfig, PFPPOConfig, PPOTrainerConfig
from hybridrl.config.roles import active_roles
from hybridrl.errors import AlgorithmError
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import IMAGE_DIGEST
from hybridrl.workers.losses import FULL_KL

SLOT = "slot"  # column for cutting a drawn batch into mini-batches: uid of the row that a drawn row replaces


def check_estimator(config: PPOTrainerConfig) -> None:
    """Refuse an estimator whose inputs this run will not have, before a model is loaded.

    Raises:
        AlgorithmError: an input is missing; the error names it and the setting that provides it.
    """
    available = {
        "uid",
        "old_log_probs",
        "reward_baselines",
        "prompt_values",
    }  # the last three are computed for an estimator that needs them
    available |= {name for spec in active_roles(config) for model_pass in spec.passes for name in model_pass.gives}
    if config.use_critic:
        available.add("values")
    agent = config.actor_rollout_ref.rollout.agent
    if agent.default_agent_loop or agent.agent_loop_config_path or agent.environment_config_path:
        available.add("turn_states")  # if no loop gives any, the estimator says so
    if config.actor_rollout_ref.actor.calculate_sum_pi_squared:
        available.add("sum_pi_squared")
    if config.algorithm.rollout_correction.rollout_is is not None:
        available.add("rollout_is_weights")
    check_adv_inputs(config.algorithm.adv_estimator, available, config.algorithm)


def apply_kl_penalty(data: DataProto, kl_ctrl: Any, kl_penalty_type: str = "kl") -> tuple[DataProto, dict[str, float]]:
    """Subtract the KL penalty: token_level_rewards - beta * KL(pi_old || pi_ref) for each token.

    The KL controller is updated with the mean KL of the batch.

    Args:
        data: `token_level_rewards`, or `token_level_scores` if there are no rewards yet; `response_mask`; `ref_kl` for
            the KL form `full`, or `old_log_probs` and `ref_log_prob` for the other forms. All are [B, T].
        kl_ctrl: has `value` (beta) and `update(current_kl, n_steps)`.

    Returns:
        The batch with `token_level_rewards`, and the metrics `actor/reward_kl_penalty`,
        `actor/reward_kl_penalty_coeff`.
    """
    fields = data.batch
    beta = kl_ctrl.value
    fields["token_level_rewards"], kl = penalise_rewards(
        fields["token_level_rewards" if "token_level_rewards" in fields.keys() else "token_level_scores"],
        fields.get("old_log_probs", None),
        fields.get("ref_log_prob", None),
        fields["response_mask"],
        beta,
        kl_penalty_type,
        ref_kl=fields["ref_kl"] if kl_penalty_type == FULL_KL else None,
    )
    kl_ctrl.update(current_kl=float(kl), n_steps=len(data))
    return data, {"actor/reward_kl_penalty": float(kl), "actor/reward_kl_penalty_coeff": beta}


def prompt_keys(batch: DataProto) -> list[str]:
    """Return a key of the content of each row's prompt: its source, messages and images; the same in every run.

    Raises:
        AlgorithmError: the batch has no messages.
    """
    columns = batch.non_tensor_batch
    if "raw_prompt" not in columns:
        raise AlgorithmError(
            "the estimator tracks values of prompts by their messages, and the batch has no column raw_prompt; use a "
            "data set that gives it, such as data.custom_cls=null, or another algorithm.adv_estimator"
        )
    empty = [None] * len(batch)
    images, sources = (columns.get(name, empty) for name in (IMAGE_DIGEST, "data_source"))
    parts = zip(sources, columns["raw_prompt"], images, strict=True)
    texts = (json.dumps([str(source), list(prompt), str(image)], sort_keys=True) for source, prompt, image in parts)
    return [hashlib.sha256(text.encode()).hexdigest()[:32] for text in texts]


def add_prompt_values(batch: DataProto, tracked: PromptValues) -> dict[str, float]:
    """Add `prompt_values` [B], those before this batch, and update them with its rewards.

    A sample counts once, whatever its number of rows, and not at all if it has no response token.

    Returns:
        The metrics `critic/prompt_values/mean` of the rows, `critic/prompt_values/prompts` seen so far.

    Raises:
        AlgorithmError: a reward is not in [0, 1], or the batch has no messages.
    """
    fields, keys = batch.batch, prompt_keys(batch)
    values = tracked.values(keys)
    fields["prompt_values"] = values
    rewards = outcome_scores(fields["token_level_rewards"], fields["response_mask"])
    has_tokens = fields["response_mask"].bool().any(dim=-1)
    sessions = sessions_of(batch)
    if sessions is not None:
        rewards, has_tokens = sessions.sum(rewards), sessions.sum(has_tokens.double()) > 0
        keys = sessions.pick(keys).tolist()
    tracked.update([key for key, counts in zip(keys, has_tokens.tolist(), strict=True) if counts], rewards[has_tokens])
    return {"critic/prompt_values/mean": values.mean().item(), "critic/prompt_values/prompts": float(len(tracked))}


def compute_advantage(
    data: DataProto, adv_estimator: str, gamma: float, lam: float, config: AlgorithmConfig
) -> DataProto:
    """Add `advantages` and `returns` [B, T]. The registered estimator gets the inputs that its parameters name.

    Raises:
        AlgorithmError: an input is missing, or rewards are not finite.
    """
    settings = ConfigView(config, gamma=gamma, lam=lam)
    tensors = {str(name): data.batch[name] for name in data.batch.keys()}
    advantages, returns = estimate_advantages(adv_estimator, tensors, data.non_tensor_batch, settings)
    data.batch["advantages"], data.batch["returns"] = advantages, returns
    return data


def critic_metrics(batch: DataProto, gamma: float) -> dict[str, float]:
    """Measure how much the critic helps, from rewards alone. Over response tokens, with G_t = r_t + gamma G_{t+1}:

        critic/vf_explained_var_mc                 1 - Var(G - V) / Var(G)
        critic/advantages/var                      Var(returns - V): the advantages of GAE before they are whitened
        critic/advantages/var_constant_baseline    Var(G): the advantages that a constant baseline would give

    `critic/vf_explained_var` compares with the lambda-returns, which contain the critic's own values. If the critic
    helps, the second metric is below the third. For a trajectory in several rows, G is computed for each row.

    Args:
        batch: after `gae`: `token_level_rewards, values, returns, response_mask` [B, T].
        gamma: `algorithm.gamma`.
    """
    fields = batch.batch
    values, mask = fields["values"], fields["response_mask"]
    rewards = rewards_to_go(fields["token_level_rewards"], mask, gamma)
    return {
        "critic/vf_explained_var_mc": explained_variance(values, rewards, mask),
        "critic/advantages/var": masked_var(fields["returns"] - values, mask).item(),
        "critic/advantages/var_constant_baseline": masked_var(rewards, mask).item(),
    }


def draw_by_reward(batch: DataProto, settings: PFPPOConfig, seed: int) -> DataProto:
    """Draw PF-PPO's batch: rows with replacement by their score, each with its own advantages, returns and uid.

    Mini-batches are cut by the positions in the batch (`slot`), not by the prompts that were drawn, so their number
    does not change.

    Args:
        batch: a batch with advantages.
        seed: seed of the draw.
    """
    places = batch.non_tensor_batch["uid"]
    generator = torch.Generator().manual_seed(seed)
    drawn: DataProto = compute_pf_ppo_reweight_data(
        batch, settings.reweight_method, settings.weight_pow, generator=generator
    )
    drawn.non_tensor_batch[SLOT] = places
    return drawn
