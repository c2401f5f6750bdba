"""Reading settings from ``config``, which may be any object with attributes.

A loss or an estimator takes its few settings from a dataclass, an OmegaConf node, a ``SimpleNamespace`` or a mapping.
Nothing is assumed of the object but its attributes, so this room does not depend on the config tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridrl.errors import AlgorithmError

_MISSING: Any = object()


def _step(node: Any, name: str) -> Any:
    if node is None:
        return _MISSING
    if isinstance(node, Mapping):
        return node.get(name, _MISSING)
    return getattr(node, name, _MISSING)


def setting(config: Any, path: str, default: Any = _MISSING, *, who: str, root: str = "actor_rollout_ref.actor") -> Any:
    """Value of ``config.<path>``, where ``path`` may go through nested objects (``policy_loss.dro_beta``).

    Args:
        config: any object with attributes, or a mapping, or None.
        path: dotted name below ``config``.
        default: returned when the attribute is absent or None; without it that is an error.
        who: what needs the value, for the message.
        root: where ``config`` stands in the user's configuration, for the message.

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
            found = "config is None" if config is None else "it is missing or null"
            raise AlgorithmError(f"{who} needs {root}.{path}, but {found}. Set {root}.{path} to a value.")
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
    """A numeric setting that must be a finite number, at least ``low`` (above it when ``open_low``).

    Raises:
        AlgorithmError: missing without a default, not a number, or out of range.
    """
    value = setting(config, path, default, who=who, root=root)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise AlgorithmError(f"{root}.{path} is {value!r}; {who} needs a number.")
    if low is not None and (value < low or (open_low and value == low)):
        bound = "greater than" if open_low else "at least"
        raise AlgorithmError(f"{root}.{path} is {value}; {who} needs a number {bound} {low:g}.")
    return float(value)


def has_setting(config: Any, name: str) -> bool:
    """Whether ``config`` has that attribute or key at all, null included."""
    return _step(config, name) is not _MISSING


class ConfigView:
    """A config with a few attributes laid over it; everything else falls through. The config itself is not touched."""

    def __init__(self, base: Any, **overlay: Any) -> None:
        self.__dict__.update(overlay)
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        value = _step(self.__dict__.get("_base"), name)
        if value is _MISSING:
            raise AttributeError(name)
        return value


def with_global_batch_info(config: Any, **info: Any) -> ConfigView:
    """``config`` with ``global_batch_info`` laid over it, the way losses learn about the whole mini-batch.

    Args:
        config: the actor's settings; any object with attributes. It is left as it is.
        info: any of ``dp_size, batch_num_tokens, global_batch_size, loss_scale_factor``, as `agg_loss` takes them.

    Returns:
        An object with all attributes of ``config`` plus ``global_batch_info``.
    """
    allowed = {"dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor"}
    unknown = sorted(set(info) - allowed)
    if unknown:
        raise AlgorithmError(f"global_batch_info has unknown entries {unknown}; known are {sorted(allowed)}.")
    return ConfigView(config, global_batch_info=info)


def global_batch_info(config: Any) -> dict[str, Any]:
    """Keyword arguments for `agg_loss` from ``config.global_batch_info``; empty when it is absent (local counts)."""
    info = setting(config, "global_batch_info", {}, who="loss aggregation")
    names = ("dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor")
    found = {name: info[name] for name in names if info.get(name) is not None}
    if "loss_scale_factor" not in found:
        factor = setting(config, "loss_scale_factor", None, who="loss aggregation")
        if factor is not None:
            found["loss_scale_factor"] = factor
    return found
