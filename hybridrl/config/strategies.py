"""Which group of settings a training engine reads: the one of the type that the engine's own settings derive from."""

import dataclasses
import functools
from typing import Any

from hybridrl.config.schema.engine import EngineConfig, FSDPConfig
from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.errors import ConfigError
from hybridrl.registry import TRAIN_ENGINES, import_external_lib

#: the groups that the schema has for training engines; an engine with other settings, or none, reads the first
ENGINE_GROUPS: tuple[type[EngineConfig], ...] = (FSDPConfig, MegatronConfig)
#: where a training engine's settings are, and the key that chooses the engine
_CHOSEN_BY = {
    "actor_rollout_ref.actor.": "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.ref.": "actor_rollout_ref.ref.strategy",
    "actor_rollout_ref.model.": "actor_rollout_ref.actor.strategy",
    "critic.": "critic.strategy",
    "distillation.": "distillation.strategy",
    "reward.reward_model.": "reward.reward_model.strategy",
    **dict.fromkeys(("engine.", "optim.", "model.", "checkpoint."), "engine.strategy"),
}

#: settings of engines that decide which ranks compute a token's outputs
_PLACES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "ulysses_sequence_parallel_size"),
)


def group_type(settings: type | None) -> type[EngineConfig]:
    """The group that holds settings of this class (`settings` of `TrainEngines.register`)."""
    bases = () if settings is None else settings.__mro__
    return next((base for base in bases if base in ENGINE_GROUPS), ENGINE_GROUPS[0])


def engine_settings(part: Any, external_lib: str | None = None) -> EngineConfig:
    """The settings that the training engine of `part.strategy` reads.

    Args:
        part: settings of a role, with `strategy` and a group for each kind of engine; or such a group itself.
        external_lib: `external_lib` of the role's model, which may register the strategy.

    Raises:
        ConfigError: `part` has no group for this engine.
    """
    import_external_lib(external_lib)
    name = engine_group(part)
    settings: EngineConfig = getattr(part, name) if name else part
    return settings


def engine_group(part: Any) -> str:
    """The name in `part` of what `engine_settings` returns; empty where that is `part` itself."""
    kind = group_type(TRAIN_ENGINES.settings(part.strategy))
    if isinstance(part, kind):
        return ""
    for field in dataclasses.fields(part):
        if isinstance(getattr(part, field.name), kind):
            return field.name
    raise ConfigError(
        f"strategy={part.strategy} reads settings of the type {kind.__name__}, and {type(part).__name__} has no such "
        "group; add one to it, or choose another strategy"
    )


def ranks_per_sequence(part: Any) -> int:
    """How many ranks share each sequence in the training engine of `part.strategy`; see `engine_settings`.

    One where `part` chooses no engine, or one that does not exist, which another check reports.
    """
    if not TRAIN_ENGINES.knows(getattr(part, "strategy", "")):
        return 1
    settings = engine_settings(part)
    kind = group_type(TRAIN_ENGINES.settings(part.strategy))
    name = "context_parallel_size" if kind is MegatronConfig else "ulysses_sequence_parallel_size"
    return int(getattr(settings, name))


def other_places(own: EngineConfig, other: EngineConfig) -> list[str]:
    """Names of the settings by which two engines compute a token's outputs on different ranks."""
    return [name for name in _PLACES if (getattr(own, name, None) or 1) != (getattr(other, name, None) or 1)]


def not_read_by(config: Any, key: str, reads: str) -> str | None:
    """The choice by which a key of the engines with the group class `reads` is not read; None if it is read."""
    chosen_by = next(choice for scope, choice in _CHOSEN_BY.items() if key.startswith(scope))
    strategy = functools.reduce(getattr, chosen_by.split("."), config)
    kind = group_type(TRAIN_ENGINES.settings(strategy))
    return None if kind.__name__ == reads else f"{chosen_by}={strategy}"


def unread_by(config: Any, key: str) -> str | None:
    """The choice by which a setting is not read, because it belongs to another training engine; None otherwise."""
    chosen_by = next((choice for scope, choice in _CHOSEN_BY.items() if key.startswith(scope)), None)
    if chosen_by is None:
        return None
    node, names = config, key.split(".")
    while names and not isinstance(node, EngineConfig):
        node = getattr(node, names.pop(0), None)
    if not isinstance(node, EngineConfig) or names[0] == "strategy":
        return None
    strategy = functools.reduce(getattr, chosen_by.split("."), config)
    kind = group_type(TRAIN_ENGINES.settings(strategy))
    foreign = {field.name for field in dataclasses.fields(node)} - {field.name for field in dataclasses.fields(kind)}
    return None if isinstance(node, kind) and names[0] not in foreign else f"{chosen_by}={strategy}"
