"""Forecast of the device memory that the models of a run need, before any of them is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hybridrl.config import PPOTrainerConfig, SupervisedConfig
from hybridrl.config.roles import ROLES
from hybridrl.config.strategies import engine_settings
from hybridrl.config.teachers import teachers_of
from hybridrl.engine.forecast import Forecast, Workload
from hybridrl.engine.train_engine import MicroBatching, train_engine_class
from hybridrl.registry import import_external_lib
from hybridrl.workers.model_worker import micro_batching
from hybridrl.workers.objectives import Objective

T = TypeVar("T")


@dataclass(frozen=True)
class NotComputed:
    """Reason why there is no forecast. A worker returns it, because one that raises an error ends its group.

    Attributes:
        reason: type and message of the error.
    """

    reason: str


def attempted(compute: Callable[..., T], *arguments: Any) -> T | NotComputed:
    """Return the result of `compute(*arguments)`, or the reason why it failed."""
    try:
        return compute(*arguments)
    except Exception as error:  # a model that cannot be computed without weights can still be trained
        return NotComputed(f"{type(error).__name__}: {error}")


def forecast_roles(config: PPOTrainerConfig, ranks: Mapping[str, int]) -> dict[str, Forecast | None]:
    """Forecast each role.

    Args:
        ranks: number of ranks of each role.

    Returns:
        None for a role whose row, strategy or kind of model has no forecast.
    """
    import_external_lib(config.actor_rollout_ref.model.external_lib)  # which may have registered roles
    makers = {name: ROLES[name].forecast if name in ROLES else None for name in ranks}
    return {name: None if (make := makers[name]) is None else make()(config, count) for name, count in ranks.items()}


def forecast_model(config: SupervisedConfig, ranks: int, role: str = "model") -> Forecast | None:
    """Forecast a model of supervised training on so many ranks; None if its strategy has no forecast.

    Args:
        role: `model`, or `reference` for the second copy that answers are compared with.
    """
    data, objective = config.data, Objective(config.objective.loss_type, config.objective)
    together = objective.rows_together
    size = data.micro_batch_size_per_gpu * together
    micro = replace(micro_batching(size, data.use_dynamic_bsz, data.max_token_len_per_gpu), rows_together=together)
    # Every token but the first may have a loss (`hybridrl.trainer.supervised.objective_rows.as_responses`).
    rows = -(-data.train_batch_size // ranks) * together
    if role == "reference":
        settings = engine_settings(config.engine, config.model.external_lib).changed(forward_only=True)
        work = Workload(1, data.max_length - 1, rows, None, micro, entropy=False)
        engine = train_engine_class(objective.model_type, config.engine.strategy)
        return engine.forecast(objective.model_type, config.model, settings, None, ranks, work)
    work = Workload(1, data.max_length - 1, rows, micro, micro if data.val_files else None, entropy=False)
    return _forecast(objective.model_type, config.engine, config.model, config.optim, ranks, work)


def forecast_policy(config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    """Forecast the policy."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    update = micro_batching(actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu)
    infer = micro_batching(
        rollout.log_prob_micro_batch_size_per_gpu,
        rollout.log_prob_use_dynamic_bsz,
        rollout.log_prob_max_token_len_per_gpu,
    )
    work = _workload(config, actor.ppo_mini_batch_size, ranks, update, infer)
    return _forecast("language_model", actor, config.actor_rollout_ref.model, actor.optim, ranks, work)


def forecast_reference(config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    """Forecast the reference policy."""
    ref = config.actor_rollout_ref.ref
    infer = micro_batching(
        ref.log_prob_micro_batch_size_per_gpu, ref.log_prob_use_dynamic_bsz, ref.log_prob_max_token_len_per_gpu
    )
    work = _workload(config, config.data.train_batch_size, ranks, None, infer)
    return _forecast("language_model", ref, config.actor_rollout_ref.model, None, ranks, work)


def forecast_teachers(config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    """Forecast the teachers. They are all there at once unless they are offloaded, and compute one after the other."""
    forecasts, settings = [], config.distillation
    for teacher in teachers_of(config).teachers:
        inference = teacher.settings.inference
        micro = MicroBatching(inference.max_num_seqs, inference.max_num_batched_tokens)
        work = _workload(config, config.data.train_batch_size, ranks, None, micro)
        forecasts.append(_forecast("language_model", settings, teacher.model, None, ranks, work))
    computed = [forecast for forecast in forecasts if forecast is not None]
    if not computed or len(computed) < len(forecasts):
        return None
    kept_weights = sum(forecast.kept_weights for forecast in computed)
    names = [field.name for field in dataclasses.fields(Forecast)]
    largest = {name: max(getattr(forecast, name) for forecast in computed) for name in names}
    changed = {
        "parameters": sum(forecast.parameters for forecast in computed),
        "weights": max(kept_weights - forecast.kept_weights + forecast.weights for forecast in computed),
        "kept_weights": kept_weights,
    }
    return Forecast(**{**largest, **changed})


def forecast_critic(config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    """Forecast the critic."""
    critic = config.critic
    update = micro_batching(
        critic.ppo_micro_batch_size_per_gpu, critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu
    )
    infer = micro_batching(
        critic.forward_micro_batch_size_per_gpu, critic.use_dynamic_bsz, critic.forward_max_token_len_per_gpu
    )
    work = _workload(config, critic.ppo_mini_batch_size, ranks, update, infer)
    return _forecast("value_model", critic, critic.model, critic.optim, ranks, work)


def forecast_reward_model(config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    """Forecast the reward model."""
    part = config.reward.reward_model
    infer = micro_batching(part.micro_batch_size_per_gpu, part.use_dynamic_bsz, part.forward_max_token_len_per_gpu)
    work = _workload(config, config.data.train_batch_size, ranks, None, infer)
    kind = "step_model" if part.steps.enable else "value_model"
    return _forecast(kind, part, part.model, None, ranks, work)


def forecast_prime(config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    """Forecast the process reward model, which learns, next to its frozen copy."""
    part = ROLES["prime"].settings_of(config)
    micro = micro_batching(part.ppo_micro_batch_size_per_gpu, part.use_dynamic_bsz, part.ppo_max_token_len_per_gpu)
    work = _workload(config, part.ppo_mini_batch_size, ranks, micro, micro)
    trained = _forecast("language_model", part, part.model, part.optim, ranks, work)
    frozen = _forecast("language_model", part, part.model, None, ranks, replace(work, update=None))
    if trained is None or frozen is None:
        return None
    frozen_weights = frozen.kept_weights
    return replace(
        trained, weights=trained.weights + frozen_weights, kept_weights=trained.kept_weights + frozen_weights
    )


def _workload(
    config: PPOTrainerConfig,
    prompts: int,
    ranks: int,
    update: MicroBatching | None,
    infer: MicroBatching,
) -> Workload:
    rows = -(-prompts * config.actor_rollout_ref.rollout.n // ranks)
    rollout = config.actor_rollout_ref.rollout
    return Workload(rollout.prompt_length, rollout.response_length, rows, update, infer, samples=rollout.n)


def _forecast(kind: str, part: Any, model: Any, optim: Any, ranks: int, work: Workload) -> Forecast | None:
    engine = train_engine_class(kind, part.strategy)
    return engine.forecast(kind, model, engine_settings(part, model.external_lib), optim, ranks, work)
