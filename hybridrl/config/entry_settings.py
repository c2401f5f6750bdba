"""Settings that an entry of a registry declares: typed and checked like all others.

An entry (a loss, an estimator, an engine, ...) may come with a dataclass of settings. They belong to the same group as
the key that chooses the entry (`EntryGroup`), so `actor.policy_loss.my_beta=0.1` is a setting if the chosen loss
declares `my_beta`. The configuration holds them as attributes of that group; the dataclass itself is the group's
attribute `own`. Training engines read one of the `ENGINE_GROUPS`: that of the type that their settings derive from.
Settings in a mapping whose keys users choose (`roles.NAME`, `reward.reward_kwargs`) are read by `read_own`. Both make
them with `hybridrl.config.convert.build`. `hybridrl.config.entry_mappings` lists those of mappings by whole keys.
"""

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config.convert import build, missing_keys, nearest
from hybridrl.config.schema.engine import EngineConfig, FSDPConfig
from hybridrl.config.schema.megatron import MegatronConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.config.schema.node import ConfigNode, ValueLimits, is_group
from hybridrl.config.schema.root import ROOTS
from hybridrl.errors import ConfigError, UserError
from hybridrl.registry import (
    ADV_ESTIMATORS,
    CURRICULA,
    INFERENCE_ENGINES,
    OBJECTIVES,
    POLICY_LOSSES,
    TRAIN_ENGINES,
    Registry,
    import_external_lib,
)


@dataclass(frozen=True)
class EntryGroup:
    """A group that accepts the settings of an entry.

    Attributes:
        path: where it is.
        chosen_by: the key that chooses the entry.
        registry: what the entry is chosen from.
        external_lib: the key that names the user's modules, which may register the entry.
    """

    path: str
    chosen_by: str
    registry: Registry[Any]
    external_lib: str


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


def engine_groups(cls: type, prefix: str = "", model: str = "") -> Iterator[EntryGroup]:
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
            chosen_by = f"{prefix}strategy" if chooses else f"{path}.strategy"
            yield EntryGroup(path, chosen_by, TRAIN_ENGINES, f"{model}.external_lib")
        else:
            yield from engine_groups(kind, f"{path}.", model)


_POLICY = "actor_rollout_ref"
_POLICY_LIB = f"{_POLICY}.model.external_lib"
ENTRY_GROUPS = (
    EntryGroup(f"{_POLICY}.actor.policy_loss", f"{_POLICY}.actor.policy_loss.loss_mode", POLICY_LOSSES, _POLICY_LIB),
    EntryGroup("algorithm", "algorithm.adv_estimator", ADV_ESTIMATORS, _POLICY_LIB),
    EntryGroup("data.mixture.curriculum", "data.mixture.curriculum.name", CURRICULA, _POLICY_LIB),
    EntryGroup(f"{_POLICY}.rollout.engine_kwargs", f"{_POLICY}.rollout.name", INFERENCE_ENGINES, _POLICY_LIB),
    *dict.fromkeys(group for tree in ROOTS.values() for group in engine_groups(tree, model=f"{_POLICY}.model")),
    *(EntryGroup(name, f"{name}.loss_type", OBJECTIVES, "model.external_lib") for name in ("sft", "dpo", "kto", "rm")),
)


def may_be_own(name: str, groups: Container[str], fields: Container[str]) -> bool:
    """Whether an unknown key may be the own setting of a registry entry.

    Args:
        groups: the tree's groups.
        fields: the tree's settings.
    """
    for group in ENTRY_GROUPS:
        if group.path in groups and name.startswith(f"{group.path}."):
            first = f"{group.path}.{name.removeprefix(f'{group.path}.').split('.')[0]}"
            return first not in groups and first not in fields
    return False


def add_own_settings(
    config: ConfigNode | Mapping[str, Any],
    tree: Mapping[str, Any],
    faults: dict[str, str],
    origins: Mapping[str, str],
    suggest: Callable[[str], str],
    groups: Sequence[EntryGroup] = ENTRY_GROUPS,
) -> None:
    """Set `own` of every `EntryGroup`, from the values of `tree` that no key of the schema took.

    Args:
        config: the typed configuration, or a mapping with typed groups.
        tree: the resolved values that it was built from.
        faults: receives, by dotted key, a sentence for each key that no entry declares and each value that does not
            fit.
        origins: where a key was set.
        suggest: returns the schema's keys similar to an unknown one, as the end of a sentence.
        groups: those of the schema, or others.
    """
    for group in groups:
        node = _at(config, group.path)
        if node is None:
            continue
        values = _at(tree, group.path) or {}
        name = _at(config, group.chosen_by)
        unknown = [key for key in values if key not in {field.name for field in dataclasses.fields(node)}]
        try:
            if unknown or not group.registry.knows(name):
                import_external_lib(_at(config, group.external_lib))
        except UserError as error:
            if unknown:  # otherwise `validate` reports it together with all other faults
                faults[group.external_lib] = f"{group.external_lib.removesuffix('model.external_lib')}{error}"
            continue
        if unknown and name not in _choices(config, group.chosen_by):
            wrong = fault_of_name(group.registry, name, group.chosen_by, group.external_lib)
            if wrong is not None:  # the unknown keys may be settings of the entry that was meant
                faults[group.chosen_by] = wrong
                continue
        try:
            settings = group.registry.settings(name) if _may_have_settings(group, name, unknown) else None
        except UserError as error:
            if unknown:
                faults[group.chosen_by] = str(error).replace(group.registry.key, group.chosen_by, 1)
            continue
        if isinstance(node, EngineConfig) and not isinstance(node, group_type(settings)):
            settings = None  # they belong to another group of the same role
        fields = _own_fields(settings, type(node))
        if settings is not None and fields:
            own = {key: value for key, value in values.items() if key in fields}
            missing = [key for key in missing_keys(settings, own) if key in fields]
            for key in missing:
                faults[f"{group.path}.{key}"] = f"{group.path}.{key} must be set for {group.chosen_by}={name}"
            if not missing:
                node.own = build(settings, own, faults, origins, f"{group.path}.")
        for key in unknown:
            if key not in fields:
                full = f"{group.path}.{key}"
                both = [f"{group.path}.{other}" for other in dict.fromkeys((*fields, *node.keys()))] if fields else []
                hint = nearest(full, both) or suggest(full)
                faults[full] = f"{full}{origins.get(full, '')}: unknown key{hint}"


def fault_of_name(registry: Registry[Any], name: str, key: str, external_lib: str) -> str | None:
    """A sentence about a name that chooses no entry; None if it chooses one.

    Args:
        registry: what is chosen from, after the modules of `external_lib` have registered theirs.
        name: the name or location.
        key: the setting that holds it.
        external_lib: the setting that names the user's modules.
    """
    if registry.is_builtin(name):
        return None
    if not registry.knows(name):
        names = registry.names()
        return (
            f"{key}={name}: unknown; choose from {', '.join(names)}{nearest(name, names, 1)}. Register your own with "
            f"{registry.decorators[-1]} in a module that {external_lib} names, or name it as module:attribute"
        )
    try:
        registry.get(name)
    except UserError as error:
        return str(error).replace(registry.key, key, 1)
    return None


def _choices(config: ConfigNode | Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """Values of a setting that name no entry of its registry, such as `auto`."""
    parent, _, last = name.rpartition(".")
    limits: ValueLimits = _at(config, parent).__dataclass_fields__[last].metadata["limits"]
    return limits.choices


def _may_have_settings(group: EntryGroup, name: Any, unknown: list[str]) -> bool:
    """Whether the entry may have own settings: a built-in one has none outside the schema and need not be imported."""
    return group.registry.knows(name) and (bool(unknown) or not group.registry.is_builtin(name))


def _own_fields(settings: type | None, group: type) -> list[str]:
    """Return the fields that are new keys: neither keys of the schema nor read elsewhere."""
    if settings is None:
        return []
    schema_fields = {field.name for field in dataclasses.fields(group)}
    return [
        field.name
        for field in dataclasses.fields(settings)
        if field.name not in schema_fields and field.metadata.get("path") is None
    ]


def _at(node: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(node, Mapping):
            node = node.get(part)
        else:
            node = getattr(node, part, None)
        if node is None:
            return None
    return node


def read_reward_kwargs(settings: type | None, manager: str, config: Any) -> tuple[Any, list[str]]:
    """Return `reward.reward_kwargs` as settings of a reward manager, and a sentence for each fault; see `read_own`.

    Args:
        settings: the manager's dataclass; None: it has no settings, and None is returned for them.
        manager: its name, for messages.
        config: the run's configuration.
    """
    values = dict(config.reward.reward_kwargs or {})
    if settings is not None:
        return read_own(settings, values, "reward.reward_kwargs.", config)
    fault = (
        f"reward.reward_kwargs has {', '.join(values)}, and the reward manager {manager} has no settings; arguments of "
        "the reward function itself are reward.custom_reward_function.reward_kwargs"
    )
    return None, [fault] if values else []


def read_own(settings: type, values: Mapping[str, Any], prefix: str, config: Any) -> tuple[Any, list[str]]:
    """Return an instance of `settings` from a free mapping, and a sentence for each key or value that does not fit.

    There is no instance (None) if a key without a default is missing. Groups for training engines follow `strategy` of
    the settings, and accept the settings of the engine that it names.

    Args:
        prefix: dotted path of the mapping, ending in a dot.
        config: the run's configuration. If the dataclass has a method `check(config)`, which yields sentences, those
            are added.
    """
    engines = list(engine_groups(settings, prefix, f"{_POLICY}.model"))
    faults = dict(_unknown(settings, values, prefix, [group.path for group in engines]))
    if missing := missing_keys(settings, values):
        return None, [*faults.values(), *(f"{prefix}{name} is missing; it has no default" for name in missing)]
    built = build(settings, values, faults, {}, prefix)
    if engines:
        policy = {_POLICY: config.actor_rollout_ref}
        _add_of_engines({**policy, **_nested(prefix, built)}, _nested(prefix, values), faults, engines)
    check = getattr(built, "check", None)
    more = list(check(config)) if check is not None and not faults else []
    return built, [*faults.values(), *more]


def _nested(prefix: str, value: Any) -> dict[str, Any]:
    """Mappings in which `value` is at a dotted path that ends in a dot."""
    first, _, rest = prefix.partition(".")
    return {first: _nested(rest, value) if rest else value}


def _add_of_engines(
    config: Mapping[str, Any], tree: Mapping[str, Any], faults: dict[str, str], engines: Sequence[EntryGroup]
) -> None:
    """Have groups of settings follow the choice of their engine, and set their `own`; see `add_own_settings`."""
    open_groups = []
    for group in engines:
        values = _at(tree, group.path) or {}
        if not isinstance(values, Mapping):  # a fault already
            continue
        if "strategy" not in values:
            _at(config, group.path).strategy = _at(config, group.chosen_by)
        open_groups.append(group)

    def nearest_in_group(name: str) -> str:
        path, _, last = name.rpartition(".")
        keys = list(_at(config, path).keys())
        return f"{nearest(last, keys)}; choose from {', '.join(keys)}"

    add_own_settings(config, tree, faults, {}, nearest_in_group, open_groups)


def _unknown(
    settings: type, values: Mapping[str, Any], prefix: str, open_paths: Container[str]
) -> Iterator[tuple[str, str]]:
    """A sentence for each unknown key, except those right in the groups at `open_paths`."""
    fields = {field.name: field for field in dataclasses.fields(settings)}
    for name, value in values.items():
        if name not in fields and prefix[:-1] in open_paths:
            continue
        if name not in fields:
            has = ", ".join(fields) or "none"
            yield f"{prefix}{name}", f"{prefix}{name}: unknown key{nearest(name, list(fields))}; choose from {has}"
        elif is_group(fields[name]) and isinstance(value, Mapping):
            yield from _unknown(fields[name].type, value, f"{prefix}{name}.", open_paths)  # type: ignore[arg-type]


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
    """Return the number of ranks that share a sequence in the engine of `part.strategy`; see `engine_settings`.

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
