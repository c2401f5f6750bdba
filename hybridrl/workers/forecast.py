"""What the models of a run will take of their devices' memory, before any of them is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridrl.config import PPOTrainerConfig, SFTTrainerConfig
from hybridrl.config.strategies import engine_settings
from hybridrl.engine.forecast import Forecast, Workload
from hybridrl.engine.train_engine import MicroBatching, TrainEngines
from hybridrl.workers.model_worker import micro_batching


def forecast_roles(config: PPOTrainerConfig, ranks: Mapping[str, int]) -> dict[str, Forecast | None]:
    """Forecast each role.

    Args:
        ranks: number of ranks of each role.

    Returns:
        None for a role whose strategy or kind of model has no forecast.
    """
    makers = {"actor_rollout": _policy, "ref": _reference, "critic": _critic, "reward_model": _reward_model}
    return {name: makers[name](config, count) if name in makers else None for name, count in ranks.items()}


def forecast_model(config: SFTTrainerConfig, ranks: int) -> Forecast | None:
    """Forecast the model of supervised fine-tuning on so many ranks; None if its strategy has no forecast."""
    data = config.data
    micro = micro_batching(data.micro_batch_size_per_gpu, data.use_dynamic_bsz, data.max_token_len_per_gpu)
    # Every token but the first may have a loss (`hybridrl.trainer.supervised.trainer.as_responses`).
    rows = -(-data.train_batch_size // ranks)
    work = Workload(1, data.max_length - 1, rows, micro, micro if data.val_files else None, entropy=False)
    return _forecast("language_model", config.engine, config.model, config.optim, ranks, work)


def _policy(config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    update = micro_batching(actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu)
    infer = micro_batching(
        rollout.log_prob_micro_batch_size_per_gpu,
        rollout.log_prob_use_dynamic_bsz,
        rollout.log_prob_max_token_len_per_gpu,
    )
    work = _workload(config, actor.ppo_mini_batch_size, ranks, update, infer)
    return _forecast("language_model", actor, config.actor_rollout_ref.model, actor.optim, ranks, work)


def _reference(config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    ref = config.actor_rollout_ref.ref
    infer = micro_batching(
        ref.log_prob_micro_batch_size_per_gpu, ref.log_prob_use_dynamic_bsz, ref.log_prob_max_token_len_per_gpu
    )
    work = _workload(config, config.data.train_batch_size, ranks, None, infer)
    return _forecast("language_model", ref, config.actor_rollout_ref.model, None, ranks, work)


def _critic(config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    critic = config.critic
    update = micro_batching(
        critic.ppo_micro_batch_size_per_gpu, critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu
    )
    infer = micro_batching(
        critic.forward_micro_batch_size_per_gpu, critic.use_dynamic_bsz, critic.forward_max_token_len_per_gpu
    )
    work = _workload(config, critic.ppo_mini_batch_size, ranks, update, infer)
    return _forecast("value_model", critic, critic.model, critic.optim, ranks, work)


def _reward_model(config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    part = config.reward.reward_model
    infer = micro_batching(part.micro_batch_size_per_gpu, part.use_dynamic_bsz, part.forward_max_token_len_per_gpu)
    work = _workload(config, config.data.train_batch_size, ranks, None, infer)
    return _forecast("value_model", part, part.model, None, ranks, work)


def _workload(
    config: PPOTrainerConfig,
    prompts: int,
    ranks: int,
    update: MicroBatching | None,
    infer: MicroBatching,
) -> Workload:
    rows = -(-prompts * config.actor_rollout_ref.rollout.n // ranks)
    rollout = config.actor_rollout_ref.rollout
    return Workload(rollout.prompt_length, rollout.response_length, rows, update, infer)


def _forecast(kind: str, part: Any, model: Any, optim: Any, ranks: int, work: Workload) -> Forecast | None:
    engine = TrainEngines.get(kind, part.strategy)
    return engine.forecast(kind, model, engine_settings(part, model.external_lib), optim, ranks, work)
