"""Settings in mappings whose keys the user chooses: `roles.NAME` and `distillation.teacher_models.NAME`.

The configuration keeps each such mapping as one setting. To compare two configurations, this module opens them: every
setting of a role or a teacher has a key of its own, and one that was not given has its default.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.config.convert import build, missing_keys
from hybridrl.config.differences import leaves
from hybridrl.config.roles import ROLES
from hybridrl.config.schema.distillation import TeacherModelConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.config.schema.node import ConfigNode, declared
from hybridrl.config.schema.root import PPOTrainerConfig

ROLE_SETTINGS, TEACHERS = "roles", "distillation.teacher_models"


def open_mappings(*trees: dict[str, Any]) -> None:
    """Replace both mappings, in each of several sets of settings by dotted key, by the settings in them.

    A role or teacher that is in one tree is in all of them, with its defaults where nothing was given. Settings that a
    tree has by their own keys already are kept.
    """
    for where in (ROLE_SETTINGS, TEACHERS):
        mappings = [tree.pop(where, None) or {} for tree in trees]
        names = [name for mapping in mappings for name in mapping]
        names += [
            key.removeprefix(f"{where}.").split(".")[0] for tree in trees for key in tree if key.startswith(f"{where}.")
        ]
        for name in dict.fromkeys(names):
            for tree, mapping in zip(trees, mappings, strict=True):
                tree |= dict(_settings_of(where, name, mapping.get(name, {}))) | tree


def idle_settings(config: ConfigNode) -> list[str]:
    """Return what the keys of models, roles and teachers begin with that take no part in the run."""
    if not isinstance(config, PPOTrainerConfig):
        return []
    idle = [f"{ROLE_SETTINGS}.{name}." for name, spec in ROLES.items() if not spec.needed(config)]
    idle += ["critic."] * (not config.use_critic)
    idle += ["reward.reward_model."] * (not config.reward.reward_model.enable)
    return idle if config.distillation.enabled else [*idle, "distillation.distillation_loss.", f"{TEACHERS}."]


def names_model(key: str) -> bool:
    """Whether a setting of a role or a teacher says which weights are loaded."""
    if key.startswith(f"{TEACHERS}."):
        return key.endswith(".model_path")
    _, _, rest = key.partition(f"{ROLE_SETTINGS}.")
    name, _, inner = rest.partition(".")
    spec = ROLES.get(name)
    if not key.startswith(f"{ROLE_SETTINGS}.") or spec is None or spec.settings is None:
        return False
    paths = [f"{field.name}.path" for field in dataclasses.fields(spec.settings) if _is_model(field.type)]
    settings = build(spec.settings, {}, {}, {})
    second = spec.copy(settings)
    return inner in (*paths, *(() if second is None else (second[0],)))


def _settings_of(where: str, name: str, raw: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a role or teacher by whole keys."""
    prefix = f"{where}.{name}."
    spec = ROLES.get(name) if where == ROLE_SETTINGS else None
    schema = TeacherModelConfig if where == TEACHERS else spec.settings if spec is not None else None
    if not isinstance(raw, Mapping):
        yield prefix.removesuffix("."), raw
        return
    keys = set() if schema is None else set(declared(schema))
    own = dict(leaves(raw, keys))
    if schema is not None and not missing_keys(schema, raw):
        faults: dict[str, str] = {}
        settings = build(schema, raw, faults, {}, prefix)
        values = dict(leaves(dataclasses.asdict(settings), keys))
        if spec is not None and (second := spec.copy(settings)) is not None:
            values[second[0]] = second[1].path  # what it follows, if it is not given
        unfit = {key.removeprefix(prefix) for key in faults}
        own = {**values, **{key: value for key, value in own.items() if key not in values or key in unfit}}
    yield from ((f"{prefix}{key}", value) for key, value in own.items())


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, ModelConfig)
