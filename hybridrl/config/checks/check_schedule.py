"""Checks of asynchronous training (`trainer.v1`): how far generation runs ahead, its devices, and scorers."""

import math
from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.roles import active_roles, pool_of
from hybridrl.config.schema.root import PPOTrainerConfig

_MODE = "trainer.v1.trainer_mode"


def check_schedule(config: PPOTrainerConfig) -> Iterator[str]:
    """Check that generation can run ahead of training with these settings."""
    mode, replay = config.trainer.v1, config.trainer.replay
    if replay is not None:
        yield from _check_replay(config, replay)
    yield from _check_stored(config)
    yield from _check_number_of_replicas(config)
    if not mode.staleness:
        return
    rollout = config.actor_rollout_ref.rollout
    where = f"{_MODE}={mode.trainer_mode}"
    if mode.trainer_mode == "separate_async" and not rollout.nnodes:
        yield (
            f"{where}: generation has no devices of its own (actor_rollout_ref.rollout.nnodes=0). Set "
            "actor_rollout_ref.rollout.nnodes=1 with rollout.n_gpus_per_node, or trainer_mode=colocate_async"
        )
    if mode.trainer_mode == "colocate_async" and rollout.nnodes:
        yield (
            f"{where} with actor_rollout_ref.rollout.nnodes={rollout.nnodes}: generation has devices of its own; set "
            "trainer_mode=separate_async, or rollout.nnodes=0"
        )
    separate = mode.trainer_mode == "separate_async"
    if separate and mode.separate_async.background_validation and config.trainer.best_metric is not None:
        yield (
            f"trainer.best_metric={config.trainer.best_metric} with trainer.v1.separate_async.background_validation="
            "True: the step that was validated has been trained on when its value is known, and cannot be saved any "
            "more. Leave background_validation away"
        )
    yield from _check_sizes(config, where)
    updates = -(-config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size)
    step = mode.separate_async.parameter_sync_step
    if mode.trainer_mode == "separate_async" and step not in (None, updates):
        yield (
            f"trainer.v1.separate_async.parameter_sync_step={step}: weights are sent once a step, which has {updates} "
            f"updates (data.train_batch_size={config.data.train_batch_size}, ppo_mini_batch_size="
            f"{config.actor_rollout_ref.actor.ppo_mini_batch_size}). Set train_batch_size to {step} times the mini-"
            "batch, or leave parameter_sync_step away"
        )
    yield from _check_scorers(config, where)


def _check_replay(config: PPOTrainerConfig, replay: str) -> Iterator[str]:
    """Check that a recording is there, and that nothing asks for other batches."""
    if not Path(replay).expanduser().is_dir():
        yield f"trainer.replay={replay}: no such folder (from {Path.cwd()})"
    if config.trainer.record:
        yield f"trainer.replay={replay} with trainer.record=True: the batches are recorded already; set one of the two"


def _check_stored(config: PPOTrainerConfig) -> Iterator[str]:
    """Check that stored batches can take the place of generation (`skip.rollout`)."""
    skip = config.skip.rollout
    if not skip.enable:
        return
    others = {"trainer.record": config.trainer.record, "trainer.replay": config.trainer.replay is not None}
    for key in (name for name, is_set in others.items() if is_set):
        yield f"skip.rollout.enable=True with {key}: both store or read the batch of a step; set one of the two"
    if skip.action == "repeat" and not skip.steps:
        yield "skip.rollout.action=repeat: no steps to repeat; set skip.rollout.steps, such as [1,2]"
    if any(step < 1 for step in skip.steps):
        yield f"skip.rollout.steps={skip.steps}: steps count from 1"


def _check_number_of_replicas(config: PPOTrainerConfig) -> Iterator[str]:
    """Check that replicas can join and leave, and that the run starts with a number that is allowed."""
    rollout, where = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout.replicas"
    size = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size * rollout.data_parallel_size
    initial, limits = rollout.nnodes * rollout.n_gpus_per_node // size, rollout.replicas
    bounds = limits.bounds(initial)
    if bounds is None:
        return
    settings = " ".join(
        f"{where}.{name}={value}" for name, value in (("min", limits.min), ("max", limits.max)) if value is not None
    )
    mode = config.trainer.v1.trainer_mode
    if mode != "separate_async":
        yield (
            f"{settings} with {_MODE}={mode}: replicas join and leave only where they have devices of their own, also "
            f"during updates. Set {_MODE}=separate_async with actor_rollout_ref.rollout.nnodes, or leave {where} away"
        )
    elif initial and not bounds[0] <= initial <= bounds[1]:
        yield (
            f"{settings}: the run starts with {initial} replicas (rollout.nnodes={rollout.nnodes} times "
            f"n_gpus_per_node={rollout.n_gpus_per_node}, {size} devices each). Set min to at most {initial} and max to "
            f"at least {initial}, or change nnodes or n_gpus_per_node"
        )


def _check_sizes(config: PPOTrainerConfig, where: str) -> Iterator[str]:
    """Check that a lot fits next to a step. With P prompts a step there are floor((1 + S) P) - (W - 1) places."""
    mode, prompts = config.trainer.v1, config.data.train_batch_size
    lot, ahead = config.data.gen_batch_size or prompts, mode.staleness
    widest = math.floor(ahead * prompts) + 1
    if mode.window > widest:
        yield (
            f"trainer.v1.window={mode.window}: at most {widest}, with {prompts} prompts per step and "
            f"num_warmup_batches={ahead:g}"
        )
        return
    room = math.floor((1 + ahead) * prompts) - (mode.window - 1) - (prompts - 1)
    if lot > room:
        yield (
            f"{where} with num_warmup_batches={ahead:g} and window={mode.window}: {lot} prompts are drawn at once, and "
            f"{room} fit next to a step of {prompts}. Set data.gen_batch_size={room} or less, or raise "
            "num_warmup_batches"
        )


def _check_scorers(config: PPOTrainerConfig, where: str) -> Iterator[str]:
    """Check that models that score are not on the devices of training, which they would use during an update."""
    policy = config.placement.roles.get("actor_rollout_ref")
    for spec in active_roles(config):
        if (spec.scoring is not None or spec.asked_in) and pool_of(spec, config) == policy:
            yield (
                f"{where}: {spec.name} scores responses on the devices of training, while these train. Give it a pool "
                "of its own, or set trainer_mode=sync"
            )
