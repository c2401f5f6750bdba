"""Which settings the chosen training engine of a model does not read, because they belong to another engine."""

import dataclasses
from typing import Any

from hybridrl.config.entry_settings import group_type
from hybridrl.config.roles import ROLES
from hybridrl.config.schema.engine import EngineConfig
from hybridrl.config.schema.root import SupervisedConfig
from hybridrl.errors import ConfigError
from hybridrl.registry import TRAIN_ENGINES


def not_read_by(config: Any, key: str, reads: str) -> str | None:
    """The choice by which a key of the engines with the group class `reads` is not read; None if it is read."""
    where, part = _chooser(config, key)
    if part is None or group_type(TRAIN_ENGINES.settings(part.strategy)).__name__ == reads:
        return None
    return f"{where}.strategy={part.strategy}"


def unread_by(config: Any, key: str) -> str | None:
    """The choice by which a setting is not read, because it belongs to another training engine; None otherwise."""
    where, part = _chooser(config, key)
    if part is None or not key.startswith(f"{where}."):
        return None
    node, names = part, key.removeprefix(f"{where}.").split(".")
    while names and not isinstance(node, EngineConfig):
        node = getattr(node, names.pop(0), None)
    if not isinstance(node, EngineConfig) or names[0] == "strategy":
        return None
    kind = group_type(TRAIN_ENGINES.settings(part.strategy))
    foreign = {field.name for field in dataclasses.fields(node)} - {field.name for field in dataclasses.fields(kind)}
    return None if isinstance(node, kind) and names[0] not in foreign else f"{where}.strategy={part.strategy}"


def _chooser(config: Any, key: str) -> tuple[str, Any]:
    """The settings that choose the training engine of the model to which a key belongs, and where they are.

    The settings are None where the key belongs to no such model, or where they are faulty, which another check reports.
    """
    if isinstance(config, SupervisedConfig):
        return "engine", config.engine
    for spec in ROLES.values():
        if key.startswith((f"{spec.where}.", f"{spec.model_path}.")):
            try:
                settings = spec.settings_of(config)
            except ConfigError:
                continue
            if hasattr(settings, "strategy"):
                return spec.where, settings
    return "", None
