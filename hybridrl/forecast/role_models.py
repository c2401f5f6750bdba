"""Forecast of the device memory that the models of a run need, before any of them is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hybridrl.config import PPOTrainerConfig, SupervisedConfig
from hybridrl.config.entry_settings import engine_settings
from hybridrl.config.roles import POLICY, REFERENCE, ROLES, TEACHER
from hybridrl.config.teachers import teachers_of
from hybridrl.engine.train_engine import MicroBatching
from hybridrl.forecast.engine_models import forecast_engine, forecast_part
from hybridrl.forecast.sizes import Forecast, Workload
from hybridrl.registry import import_external_lib
from hybridrl.workers.model_worker import micro_batching
from hybridrl.workers.objectives import Objective

T = TypeVar("T")
#: gets a role's settings, the whole configuration and the number of ranks; returns None where it cannot tell
RoleForecast = Callable[[Any, PPOTrainerConfig, int], Forecast | None]
Function = TypeVar("Function", bound=RoleForecast)

ROLE_FORECASTS: dict[str, RoleForecast] = {}


def forecasts_role(name: str) -> Callable[[Function], Function]:
    """Function decorator: this function computes the memory of the models of a role in `hybridrl.config.roles`."""

    def add(function: Function) -> Function:
        ROLE_FORECASTS[name] = function
        return function

    return add


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
        None for a role without a function, or whose strategy or kind of model has no forecast.
    """
    import_external_lib(config.actor_rollout_ref.model.external_lib)  # which may have registered roles
    return {name: _of_role(name, config, count) for name, count in ranks.items()}


def _of_role(name: str, config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    compute = ROLE_FORECASTS.get(name)
    return None if compute is None else compute(ROLES[name].settings_of(config), config, ranks)


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
        strategy = config.engine.strategy
        return forecast_engine(objective.model_type, strategy, config.model, settings, None, ranks, work)
    work = Workload(1, data.max_length - 1, rows, micro, micro if data.val_files else None, entropy=False)
    return forecast_part(objective.model_type, config.engine, config.model, config.optim, ranks, work)


@forecasts_role(POLICY)
def _policy(part: Any, config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    """Forecast the policy."""
    rollout = config.actor_rollout_ref.rollout
    update = micro_batching(part.ppo_micro_batch_size_per_gpu, part.use_dynamic_bsz, part.ppo_max_token_len_per_gpu)
    infer = micro_batching(
        rollout.log_prob_micro_batch_size_per_gpu,
        rollout.log_prob_use_dynamic_bsz,
        rollout.log_prob_max_token_len_per_gpu,
    )
    work = _workload(config, part.ppo_mini_batch_size, ranks, update, infer)
    return forecast_part("language_model", part, config.actor_rollout_ref.model, part.optim, ranks, work)


@forecasts_role(REFERENCE)
def _reference(part: Any, config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    """Forecast the reference policy."""
    infer = micro_batching(
        part.log_prob_micro_batch_size_per_gpu, part.log_prob_use_dynamic_bsz, part.log_prob_max_token_len_per_gpu
    )
    work = _workload(config, config.data.train_batch_size, ranks, None, infer)
    return forecast_part("language_model", part, config.actor_rollout_ref.model, None, ranks, work)


@forecasts_role(TEACHER)
def _teachers(part: Any, config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    """Forecast the teachers. They are all there at once unless they are offloaded, and compute one after the other."""
    forecasts = []
    for teacher in teachers_of(config).teachers:
        inference = teacher.settings.inference
        micro = MicroBatching(inference.max_num_seqs, inference.max_num_batched_tokens)
        work = _workload(config, config.data.train_batch_size, ranks, None, micro)
        forecasts.append(forecast_part("language_model", part, teacher.model, None, ranks, work))
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


@forecasts_role("critic")
def _critic(part: Any, config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    """Forecast the critic."""
    update = micro_batching(part.ppo_micro_batch_size_per_gpu, part.use_dynamic_bsz, part.ppo_max_token_len_per_gpu)
    infer = micro_batching(
        part.forward_micro_batch_size_per_gpu, part.use_dynamic_bsz, part.forward_max_token_len_per_gpu
    )
    work = _workload(config, part.ppo_mini_batch_size, ranks, update, infer)
    return forecast_part("value_model", part, part.model, part.optim, ranks, work)


@forecasts_role("reward_model")
def _reward_model(part: Any, config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    """Forecast the reward model."""
    infer = micro_batching(part.micro_batch_size_per_gpu, part.use_dynamic_bsz, part.forward_max_token_len_per_gpu)
    work = _workload(config, config.data.train_batch_size, ranks, None, infer)
    kind = "step_model" if part.steps.enable else "value_model"
    return forecast_part(kind, part, part.model, None, ranks, work)


@forecasts_role("prime")
def _prime(part: Any, config: PPOTrainerConfig, ranks: int) -> Forecast | None:
    """Forecast the process reward model, which learns, next to its frozen copy."""
    micro = micro_batching(part.ppo_micro_batch_size_per_gpu, part.use_dynamic_bsz, part.ppo_max_token_len_per_gpu)
    work = _workload(config, part.ppo_mini_batch_size, ranks, micro, micro)
    trained = forecast_part("language_model", part, part.model, part.optim, ranks, work)
    frozen = forecast_part("language_model", part, part.model, None, ranks, replace(work, update=None))
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
