"""Which group of settings a training engine reads: the one of the type that the engine's own settings derive from."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from hybridrl.config.schema.engine import EngineConfig, FSDPConfig
from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.config.schema.node import is_group
from hybridrl.errors import ConfigError
from hybridrl.registry import TRAIN_ENGINES, import_external_lib

#: the groups that the schema has for training engines; an engine with other settings, or none, reads the first
ENGINE_GROUPS: tuple[type[EngineConfig], ...] = (FSDPConfig, MegatronConfig)
#: settings of engines that decide which ranks compute a token's outputs
_PLACES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "ulysses_sequence_parallel_size"),
)


def group_type(settings: type | None) -> type[EngineConfig]:
    """The group that holds settings of this class (`settings` of `register_train_engine`)."""
    bases = () if settings is None else settings.__mro__
    return next((base for base in bases if base in ENGINE_GROUPS), ENGINE_GROUPS[0])


@dataclasses.dataclass(frozen=True)
class EngineGroup:
    """A group of settings of a training engine in a tree of settings.

    Attributes:
        path: where it is.
        chosen_by: the key that chooses the engine.
        model: the settings of the model that the engine gets; empty where the tree has none next to or above `path`.
    """

    path: str
    chosen_by: str
    model: str


def engine_groups(cls: type, prefix: str = "", model: str = "") -> Iterator[EngineGroup]:
    """Yield every group of settings of a training engine below a dataclass of settings.

    Args:
        prefix: where the settings are, ending in a dot.
        model: the settings of the model of engines that have none below `prefix`.
    """
    fields = dataclasses.fields(cls)
    model = next((f"{prefix}{field.name}" for field in fields if field.type is ModelConfig), model)
    chooses = any(field.name == "strategy" for field in fields)
    for field in filter(is_group, fields):
        path, kind = f"{prefix}{field.name}", field.type
        assert isinstance(kind, type)
        if issubclass(kind, EngineConfig):
            yield EngineGroup(path, f"{prefix}strategy" if chooses else f"{path}.strategy", model)
        else:
            yield from engine_groups(kind, f"{path}.", model)


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

    One where `part` chooses no engine, or one that does not exist or whose settings it lacks, which another check
    reports.
    """
    if not TRAIN_ENGINES.knows(getattr(part, "strategy", "")):
        return 1
    kind = group_type(TRAIN_ENGINES.settings(part.strategy))
    try:
        return int(getattr(engine_settings(part), kind.sequence_shared_by))
    except ConfigError:
        return 1


def other_places(own: EngineConfig, other: EngineConfig) -> list[str]:
    """Names of the settings by which two engines compute a token's outputs on different ranks."""
    return [name for name in _PLACES if (getattr(own, name, None) or 1) != (getattr(other, name, None) or 1)]
