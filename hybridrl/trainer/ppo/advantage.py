"""From scores to advantages: the KL penalty in the reward and the call of the configured estimator."""

import inspect
from typing import Any

import torch

from hybridrl.algorithms import get_adv_estimator_fn, kl_penalty, masked_mean
from hybridrl.config import AlgorithmConfig
from hybridrl.protocol import DataProto
from hybridrl.utils.errors import UserError


def apply_kl_penalty(data: DataProto, kl_ctrl: Any, kl_penalty_type: str = "kl") -> tuple[DataProto, dict[str, float]]:
    """token_level_rewards = token_level_scores - beta * KL(pi_old || pi_ref), token by token; the controller sees the
    batch's mean KL.

    Args:
        data: `token_level_scores`, `old_log_probs`, `ref_log_prob`, `response_mask`, all [B, T].
        kl_ctrl: has `value` (beta) and `update(current_kl, n_steps)`.

    Returns:
        The batch with `token_level_rewards`, and the metrics `actor/reward_kl_penalty`,
        `actor/reward_kl_penalty_coeff`.
    """
    mask = data.batch["response_mask"]
    divergence = kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty_type)
    divergence = torch.where(mask.bool(), divergence, 0.0)
    beta = kl_ctrl.value
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - beta * divergence
    current = masked_mean(divergence, mask, axis=-1).mean().item()
    kl_ctrl.update(current_kl=current, n_steps=len(data))
    return data, {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": beta}


def compute_advantage(
    data: DataProto, adv_estimator: str, gamma: float, lam: float, config: AlgorithmConfig
) -> DataProto:
    """`advantages` and `returns` [B, T] by the registered estimator.

    An estimator is called with those of its parameters that the batch or the configuration can fill:
        `token_level_rewards`,
    `response_mask`, `index` (the rows' uid), `values`, `gamma`, `lam`, `norm_adv_by_std_in_grpo`, `old_log_probs`,
    `reward_baselines`, `sum_pi_squared`, `rollout_is_weights`, `non_tensor_batch`, `batch`, `config`.

    Raises:
        UserError: the estimator needs an input that this run does not produce.
    """
    estimator = get_adv_estimator_fn(adv_estimator)
    tensors = data.batch
    available: dict[str, Any] = {
        "token_level_rewards": tensors["token_level_rewards"],
        "response_mask": tensors["response_mask"],
        "index": data.non_tensor_batch["uid"],
        "gamma": gamma,
        "lam": lam,
        "norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo,
        "non_tensor_batch": data.non_tensor_batch,
        "batch": tensors,
        "config": config,
    }
    for name in ("values", "old_log_probs", "reward_baselines", "sum_pi_squared", "rollout_is_weights"):
        if name in tensors.keys():
            available[name] = tensors[name]
    wanted = inspect.signature(estimator).parameters
    missing = [
        name
        for name, parameter in wanted.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in available
    ]
    if missing:
        raise UserError(
            f"algorithm.adv_estimator={adv_estimator} needs {', '.join(missing)}, which this run does not compute; "
            f"at hand are {', '.join(sorted(available))}"
        )
    advantages, returns = estimator(**{name: value for name, value in available.items() if name in wanted})
    tensors["advantages"], tensors["returns"] = advantages, returns
    return data
