"""Reading settings from `config`, which may be any object with attributes.

A loss or an estimator takes its few settings from a dataclass, an OmegaConf node, a `SimpleNamespace` or a mapping.
Only the object's attributes are used, so this package does not depend on the config tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from hybridrl.errors import AlgorithmError

_MISSING: Any = object()
S = TypeVar("S")
COUNTS = ("dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor", "sequence_lengths")


def _step(node: Any, name: str) -> Any:
    if node is None:
        return _MISSING
    if isinstance(node, Mapping):
        return node.get(name, _MISSING)
    return getattr(node, name, _MISSING)


def setting(config: Any, path: str, default: Any = _MISSING, *, who: str, root: str = "actor_rollout_ref.actor") -> Any:
    """Return `config.<path>`, where `path` may go through nested objects (`policy_loss.dro_beta`).

    Args:
        config: any object with attributes, or a mapping, or None.
        path: dotted name below `config`.
        default: returned if the attribute is absent or None; without a default that is an error.
        who: the function that needs the value, for the message.
        root: location of `config` in the user's configuration, for the message.

    Raises:
        AlgorithmError: the attribute is absent or None and there is no default.
    """
    node = config
    for name in path.split("."):
        node = _step(node, name)
        if node is _MISSING:
            break
    if node is _MISSING or node is None:
        if default is _MISSING:
            reason = "config is None" if config is None else "it is missing or null"
            raise AlgorithmError(f"{who} needs {root}.{path}, but {reason}. Set {root}.{path} to a value.")
        return default
    return node


def number(
    config: Any,
    path: str,
    default: Any = _MISSING,
    *,
    who: str,
    low: float | None = None,
    open_low: bool = False,
    root: str = "actor_rollout_ref.actor",
) -> float:
    """Return a setting that must be a finite number of at least `low` (above `low` if `open_low`).

    Raises:
        AlgorithmError: the setting is missing without a default, is not a number, or is out of range.
    """
    value = setting(config, path, default, who=who, root=root)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise AlgorithmError(f"{root}.{path} is {value!r}; {who} needs a number.")
    if low is not None and (value < low or (open_low and value == low)):
        bound = "greater than" if open_low else "at least"
        raise AlgorithmError(f"{root}.{path} is {value}; {who} needs a number {bound} {low:g}.")
    return float(value)


def read_settings(cls: type[S], config: Any, *, who: str, root: str, group: str = "") -> S:
    """Return the settings that the dataclass `cls` declares, checked against the limits of its fields.

    Args:
        cls: a dataclass; its fields may be declared with `hybridrl.config.key`. A field is read from its `path` below
            `config`, else from `group`. Absent and null values take the field's default.
        config: any object with attributes, or a mapping.
        who: the function that needs them, for messages.
        root: location of `config` in the user's configuration, for messages.
        group: prefix of the fields without a `path`, ending in a dot.

    Raises:
        AlgorithmError: there is no config, a field without a default is not set, or a number is outside its limits.
    """
    own = getattr(config, "own", None) if not group else getattr(_step(config, group.rstrip(".")), "own", None)
    if isinstance(own, cls):
        return own
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        prefix = field.metadata.get("path")
        path = (group if prefix is None else prefix) + field.name
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if config is None or required:
            value = setting(config, path, who=who, root=root)
        else:
            value = setting(config, path, None, who=who, root=root)
            if value is None:
                continue
        limits = field.metadata.get("limits")
        values[field.name] = value
        if "float" in str(field.type) or "int" in str(field.type):
            values[field.name] = _within(limits, number(config, path, who=who, root=root), f"{root}.{path}", who)
    return cls(**values)


def _within(limits: Any, value: float, name: str, who: str) -> float:
    """Return a number within the bounds of its field, as an int if it is whole and was an int."""
    if limits is None:
        return value
    low = limits.ge if limits.gt is None else limits.gt
    if low is not None and limits.le is not None and not low <= value <= limits.le:
        raise AlgorithmError(f"{name} is {value}; {who} needs a number in [{low:g}, {limits.le:g}].")
    if limits.ge is not None and value < limits.ge:
        raise AlgorithmError(f"{name} is {value}; {who} needs a number at least {limits.ge:g}.")
    if limits.gt is not None and value <= limits.gt:
        raise AlgorithmError(f"{name} is {value}; {who} needs a number greater than {limits.gt:g}.")
    if limits.le is not None and value > limits.le:
        raise AlgorithmError(f"{name} is {value}; {who} needs a number at most {limits.le:g}.")
    return value


def has_setting(config: Any, name: str) -> bool:
    """Whether `config` has this attribute or key, even if its value is null."""
    return _step(config, name) is not _MISSING


class ConfigView:
    """A view of a config with a few attributes overridden. The config itself is not changed."""

    def __init__(self, base: Any, **overlay: Any) -> None:
        self.__dict__.update(overlay)
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        value = _step(self.__dict__.get("_base"), name)
        if value is _MISSING:
            raise AttributeError(name)
        return value


def with_global_batch_info(config: Any, **info: Any) -> ConfigView:
    """Return `config` with `global_batch_info` added, where losses written for verl expect the counts.

    Args:
        config: the actor's settings; any object with attributes. It is not changed.
        info: any of `dp_size, batch_num_tokens, global_batch_size, loss_scale_factor, sequence_lengths`, as `agg_loss`
            takes them.

    Returns:
        An object with all attributes of `config` plus `global_batch_info`.
    """
    return ConfigView(config, global_batch_info=checked_counts(info))


def checked_counts(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts after checking their names.

    Raises:
        AlgorithmError: a name is unknown.
    """
    if unknown := sorted(set(counts) - set(COUNTS)):
        raise AlgorithmError(f"global counts have unknown entries {unknown}; choose from {sorted(COUNTS)}.")
    return dict(counts)


def counts_of(counts: Mapping[str, Any] | None, config: Any) -> dict[str, Any]:
    """Return the keyword arguments for `agg_loss`.

    Args:
        counts: counts of the whole mini-batch. None: those of `config.global_batch_info`, where verl puts them, if
            present, otherwise the call's own.
        config: its `loss_scale_factor` is used if the counts have none.
    """
    info = setting(config, "global_batch_info", {}, who="loss aggregation") if counts is None else counts
    loss_counts = {name: info[name] for name in COUNTS if info.get(name) is not None}
    if "loss_scale_factor" not in loss_counts:
        factor = setting(config, "loss_scale_factor", None, who="loss aggregation")
        if factor is not None:
            loss_counts["loss_scale_factor"] = factor
    return loss_counts
