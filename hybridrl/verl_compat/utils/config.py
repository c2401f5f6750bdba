"""`verl.utils.config`."""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridrl.errors import ConfigError

__all__ = ["omega_conf_to_dataclass"]


def omega_conf_to_dataclass(config: DictConfig | Mapping[str, Any], dataclass_type: type[Any] | None = None) -> Any:
    """Build the dataclass of a configuration group, with the groups in it.

    Args:
        config: its values. `_target_` names the class, also of a group in it, unless `dataclass_type` does.
        dataclass_type: the class.

    Raises:
        ConfigError: no class is known, or it has no field for a key.
    """
    values: Any = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config)
    if dataclass_type is not None:
        values.pop("_target_", None)
    return _build(values, dataclass_type)


def _build(values: dict[str, Any], cls: type[Any] | None) -> Any:
    target = values.pop("_target_", None)
    if target is not None:
        module, _, name = str(target).rpartition(".")
        cls = getattr(importlib.import_module(module), name)
    if cls is None:
        raise ConfigError("omega_conf_to_dataclass needs `_target_` in the configuration, or `dataclass_type`.")
    hints = typing.get_type_hints(cls)
    accepted = {field.name for field in dataclasses.fields(cls)} | (set(cls.__init__.__annotations__) - {"return"})
    unknown = sorted(set(values) - accepted)
    if unknown:
        raise ConfigError(f"{cls.__name__} has no {', '.join(unknown)}; it has {', '.join(sorted(accepted))}.")
    return cls(**{key: _convert(value, hints.get(key)) for key, value in values.items()})


def _convert(value: Any, hint: Any) -> Any:
    if not isinstance(value, dict):
        return value
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
    group = next((option for option in options if dataclasses.is_dataclass(option)), None)
    return _build(value, group if isinstance(group, type) else None) if group or "_target_" in value else value
