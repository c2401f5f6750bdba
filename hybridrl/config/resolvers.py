"""The functions that defaults of settings call in `${NAME:...}`."""

from typing import Any

from omegaconf import OmegaConf

from hybridrl.config.schema.actor import PolicyLossConfig
from hybridrl.config.schema.trainer import staleness_of


def register_resolvers() -> None:
    """Make the functions known that defaults use in `${NAME:...}`."""
    OmegaConf.register_new_resolver("global_pool", _global_pool, replace=True)
    OmegaConf.register_new_resolver("bypass_if_stale", _bypass_if_stale, replace=True)
    OmegaConf.register_new_resolver("weights_if_stale", _weights_if_stale, replace=True)
    OmegaConf.register_new_resolver("half_pool", _half_pool, replace=True)
    OmegaConf.register_new_resolver("if_set", _if_set, replace=True)
    OmegaConf.register_new_resolver("at_most", _at_most, replace=True)


def _at_most(limit: int, value: Any) -> int:
    """Return a number, or the limit if that is smaller, or if it is no number, which its own check names."""
    try:
        return min(limit, int(value))
    except (TypeError, ValueError):
        return limit


def _if_set(value: Any, then: Any, otherwise: Any) -> Any:
    """Return `then` if `value` is set, `otherwise` if it is null."""
    return otherwise if value is None else then


def _global_pool(processes: Any, nodes: Any) -> list[int]:
    return [int(processes)] * int(nodes)


def _bypass_if_stale(mode: str, colocated: Any, separate: Any, loss_mode: str) -> bool:
    """Return the default of `rollout_correction.bypass_mode` for responses that may be S updates old.

    Up to S = 1 the ratio of the loss is against the sampler, which needs no further pass and is right for tokens of
    mixed versions. Beyond it, and for losses that bypass mode would replace, tokens get importance weights.
    """
    return 0 < staleness_of(mode, colocated, separate) <= 1 and loss_mode == PolicyLossConfig.loss_mode


def _weights_if_stale(mode: str, colocated: Any, separate: Any, loss_mode: str) -> str | None:
    """Return the default of `rollout_correction.rollout_is`; see `_bypass_if_stale`."""
    stale = staleness_of(mode, colocated, separate) > 0
    return "token" if stale and not _bypass_if_stale(mode, colocated, separate, loss_mode) else None


def _half_pool(which: str, processes: Any, nodes: Any) -> list[int]:
    """Return half of the nodes, or of the processes if there is one node; the first half is the larger one."""
    count = int(nodes) if int(nodes) > 1 else int(processes)
    half = count - count // 2 if which == "first" else count // 2
    if int(nodes) > 1:
        return [int(processes)] * half
    return [half] if half else []
