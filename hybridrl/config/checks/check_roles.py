"""Checks of the roles of a run: what their settings hold is checked in the same way for every row of the table.

Settings of roles that take no part are checked only for what would be wrong in every run.
"""

import dataclasses
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hybridrl.config.checks.check_algorithm import check_names
from hybridrl.config.checks.paths import check_model
from hybridrl.config.entry_settings import engine_group, ranks_per_sequence
from hybridrl.config.roles import ROLES, RoleSpec, active_roles, groups_of
from hybridrl.config.schema.actor import MICRO_BATCH_SIZE
from hybridrl.config.schema.engine import CheckpointConfig, EngineConfig, OptimConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.config.schema.root import PPOTrainerConfig
from hybridrl.config.schema.trainer import JobConfig, PlacementConfig, RunConfig, TrainerConfig
from hybridrl.errors import ConfigError
from hybridrl.registry import TRAIN_ENGINES
from hybridrl.utils.user_code import names_file

_ROLLOUT = "actor_rollout_ref.rollout"
_BUDGET = "max_token_len_per_gpu"


def check_roles(config: PPOTrainerConfig) -> Iterator[str]:
    """Check every role, once the modules of `external_lib` have registered theirs."""
    try:
        active = active_roles(config)
    except ConfigError as error:
        yield from error.faults
        return
    inactive = [spec for spec in ROLES.values() if spec.path and spec not in active]
    models: set[str] = set()
    strategies: set[str] = set()
    tokens: set[int] = set()
    for spec in (*active, *inactive):
        try:
            settings = spec.settings_of(config)
        except ConfigError as error:
            yield from error.faults
            continue
        yield from _check_settings(config, spec, settings, strategies)
        if spec in active:
            yield from _check_model(config, spec, models)
            yield from _check_training(config, spec, settings)
            yield from _check_budgets(config, spec.where, settings, settings, tokens)
    actor = config.actor_rollout_ref.actor
    yield from _check_budgets(config, _ROLLOUT, config.actor_rollout_ref.rollout, actor, tokens)
    allowed = [spec.placement for spec in ROLES.values()]
    yield from check_placement(config.placement, config.trainer, allowed, [spec.placement for spec in active])


def _check_settings(config: PPOTrainerConfig, spec: RoleSpec, settings: Any, checked: set[str]) -> Iterator[str]:
    """Check what would be wrong in every run.

    Args:
        checked: strategies of earlier roles, which those of other roles follow.
    """
    where, strategy = spec.where, getattr(settings, "strategy", None)
    if strategy is not None and strategy not in checked:
        checked.add(strategy)
        yield from check_names("actor_rollout_ref.", None, {f"{where}.strategy": (TRAIN_ENGINES, strategy)})
        yield from _check_group(where, settings)
    for name, engine in groups_of(settings, EngineConfig):
        if strategy is not None and engine.strategy != strategy:
            yield (
                f"{where}.{name}.strategy={engine.strategy} and {where}.strategy={strategy} must agree; set the latter "
                "alone"
            )
        if engine.forward_only != (spec.update is None):
            kind = "frozen" if spec.update is None else "trained"
            yield f"{where}.{name}.forward_only={engine.forward_only}: {where} is {kind}; remove it"
    samples, count = config.actor_rollout_ref.rollout.n, getattr(settings, "rollout_n", None)
    if count not in (None, samples):
        yield (
            f"{where}.rollout_n={count} and {_ROLLOUT}.n={samples} are the same thing; set the latter, the former "
            "follows"
        )


def _check_group(where: str, settings: Any) -> Iterator[str]:
    """Check that settings with groups for training engines have the one that the chosen engine reads."""
    if TRAIN_ENGINES.knows(settings.strategy) and groups_of(settings, EngineConfig):
        try:
            engine_group(settings)
        except ConfigError as error:
            yield f"{where}.{error}"


def _check_model(config: PPOTrainerConfig, spec: RoleSpec, checked: set[str]) -> Iterator[str]:
    """Check the model that a role loads; several roles may load the same one."""
    if callable(spec.config):  # the models of what a function returns are known to the check of its settings
        return
    where, policy_lib = spec.config or spec.where, config.actor_rollout_ref.model.external_lib
    for name, model in groups_of(spec.config_of(config), ModelConfig):
        if model.path not in checked:
            checked.add(model.path)
            yield from check_model(f"{where}.{name}", model, config.trainer.device)
        if model.external_lib != policy_lib:
            yield from check_names(f"{where}.", model.external_lib, {})


def _check_training(config: PPOTrainerConfig, spec: RoleSpec, settings: Any) -> Iterator[str]:
    where = spec.where
    for name, checkpoint in groups_of(settings, CheckpointConfig) if spec.saved is not None else ():
        yield from check_contents(f"{where}.{name}", checkpoint, config.trainer)
    if spec.update is not None:
        yield from _check_batches(config, where, settings)
        for name, optim in groups_of(settings, OptimConfig):
            yield from check_optimizer(f"{where}.{name}", optim)


def _check_batches(config: PPOTrainerConfig, where: str, part: Any) -> Iterator[str]:
    batch, mini = config.data.train_batch_size, part.ppo_mini_batch_size
    micro = getattr(part, "ppo_micro_batch_size_per_gpu", MICRO_BATCH_SIZE)
    samples = config.actor_rollout_ref.rollout.n
    if mini > batch:
        yield (
            f"{where}.ppo_mini_batch_size={mini} is more than data.train_batch_size={batch}; both count prompts over "
            f"all processes: set it to {batch} or a divisor of it"
        )
    elif batch % mini:
        yield (
            f"data.train_batch_size={batch} is not a multiple of {where}.ppo_mini_batch_size={mini} (prompts; each has "
            f"{_ROLLOUT}.n={samples} samples); nearest divisors: {_divisors(batch, mini)}"
        )
    if micro > min(mini, batch) * samples and micro != MICRO_BATCH_SIZE:
        yield (
            f"{where}.ppo_micro_batch_size_per_gpu={micro} is more than the {mini * samples} sequences of a mini-batch "
            f"({mini} prompts x {samples} samples)"
        )


def _divisors(number: int, near: int) -> str:
    """The divisors of `number` closest to `near`, below and above."""
    below = max(d for d in range(1, near + 1) if number % d == 0)
    above = min(d for d in range(near, number + 1) if number % d == 0)
    return f"{below}, {above}" if below != above else str(below)


def _check_budgets(config: PPOTrainerConfig, where: str, settings: Any, part: Any, reported: set[int]) -> Iterator[str]:
    """Check that the longest sequence fits into a micro-batch; values that follow a reported one are left out.

    Args:
        part: settings of the role that computes, with `strategy`: its ranks may share each sequence.
    """
    rollout = config.actor_rollout_ref.rollout
    total = rollout.prompt_length + rollout.response_length
    names = [field.name for field in dataclasses.fields(settings)] if settings is not None else []
    for name in names:
        if not name.endswith(_BUDGET):
            continue
        kind = "log_prob_" if name.startswith("log_prob_") else ""
        tokens = getattr(settings, name)
        if not getattr(settings, f"{kind}use_dynamic_bsz", False) or tokens in reported:
            continue
        ranks = ranks_per_sequence(part)
        if tokens * ranks < total:
            reported.add(tokens)
            shared = f" on {ranks} ranks" if ranks > 1 else ""
            yield (
                f"{where}.{name}={tokens}{shared} is less than one sequence of {total} tokens (prompt and response); "
                "raise it"
            )


def check_optimizer(where: str, optim: OptimConfig) -> Iterator[str]:
    """Check the learning rates, and that the optimizer's file or package is there and works on sharded weights."""
    if optim.min_lr is not None and (optim.min_lr_ratio or not optim.min_lr <= optim.lr or not optim.lr):
        yield (
            f"{where}.min_lr={optim.min_lr} with lr={optim.lr} and min_lr_ratio={optim.min_lr_ratio}: min_lr may be at "
            "most lr, and says the same as min_lr_ratio; set one of the two"
        )
    package = optim.optimizer_impl.removeprefix("pkg://").split(".")[0]
    if names_file(optim.optimizer_impl):
        if not Path(optim.optimizer_impl).expanduser().is_file():
            yield f"{where}.optimizer_impl={optim.optimizer_impl}: no such file; name a Python file or a module"
    elif package == "bitsandbytes":
        yield (
            f"{where}.optimizer_impl={optim.optimizer_impl}: its optimizers cannot work on sharded weights; use "
            "optimizer_impl=torchao.optim with optimizer=AdamW8bit"
        )
    elif importlib.util.find_spec(package) is None:
        remedy = (
            "; bash scripts/install.sh auto torchao" if package == "torchao" else "; name a module that is installed"
        )
        yield f"{where}.optimizer_impl={optim.optimizer_impl}: the package {package} is not installed{remedy}"


def check_contents(where: str, checkpoint: CheckpointConfig, trainer: RunConfig) -> Iterator[str]:
    """Check that a run can be resumed from its checkpoints."""
    missing = [name for name in checkpoint.load_contents if name not in checkpoint.save_contents]
    goes_back = trainer.resume_mode != "disable" or (isinstance(trainer, TrainerConfig) and rollbacks(trainer))
    if missing:
        yield f"{where}.load_contents has {', '.join(missing)}, which {where}.save_contents does not write"
    elif "model" not in checkpoint.load_contents and goes_back:
        key = "save_contents" if "model" not in checkpoint.save_contents else "load_contents"
        yield (
            f"{where}.{key}={checkpoint[key]} lacks model (hf_model is for other programs and is never read), so "
            "no run could be resumed from such a checkpoint and no health check could roll back to it; add model, or "
            "set trainer.resume_mode=disable if none is to be"
        )


def check_hub(where: str, checkpoint: CheckpointConfig, trainer: RunConfig) -> Iterator[str]:
    """Check that the last checkpoint has a model to upload, and that the repository has a name."""
    repository = trainer.hub.model_id
    if repository is None:
        return
    if re.fullmatch(r"[\w.-]+/[\w.-]+", repository) is None:
        yield f"trainer.hub.model_id={repository}: must be ORG/NAME"
    if "hf_model" not in checkpoint.save_contents:
        contents = f"{where}.save_contents={checkpoint.save_contents}"
        yield f"trainer.hub.model_id={repository}: {contents} lacks hf_model; add it"
    if not trainer.save_last:
        yield f"trainer.hub.model_id={repository}: the last model is not saved; set trainer.save_last=True"


def rollbacks(trainer: TrainerConfig) -> list[str]:
    """Health checks that go back to a checkpoint."""
    checks = trainer.health
    return [name for name in checks.keys() if getattr(checks[name], "action", None) == "rollback"]


def check_placement(
    placement: PlacementConfig,
    trainer: JobConfig,
    allowed: Iterable[tuple[str, ...]],
    needed: Iterable[tuple[str, ...]],
) -> Iterator[str]:
    """Check the pools.

    Args:
        allowed: for each role that may be placed, the keys of `placement.roles` that may say where; the first counts.
        needed: the same for each role of the run.
    """
    pools, pool_of_role = placement.pools, placement.roles
    shape = [trainer.n_gpus_per_node] * trainer.nnodes
    if "global" in pools and pools["global"] != shape:
        yield (
            f"placement.pools.global={pools['global']} and trainer.nnodes x n_gpus_per_node = {shape} are the same "
            "thing; set those of trainer, or name your pool otherwise"
        )
    for name, processes in pools.items():
        if not processes:
            yield f"placement.pools.{name} is empty; list the processes on each machine, e.g. [2]"
        if name != "global" and name not in pool_of_role.values():
            yield f"placement.pools.{name} holds no role; map one to it in placement.roles, or remove it"
    roles = list(dict.fromkeys(key for keys in allowed for key in keys))
    for role, pool in pool_of_role.items():
        if role not in roles:
            yield f"placement.roles.{role}: unknown role; choose from {', '.join(roles)}"
        if pool not in pools:
            yield f"placement.roles.{role}={pool}: no such pool; placement.pools has {', '.join(pools) or 'none'}"
    for keys in needed:
        if not any(key in pool_of_role for key in keys):
            yield f"placement.roles.{keys[0]} is missing; name the pool in which it runs"
