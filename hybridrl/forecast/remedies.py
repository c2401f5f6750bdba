"""Settings that make a run fit: they are tried in a fixed order, and what a later one makes needless is dropped."""

import copy
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from hybridrl.config import OptimConfig
from hybridrl.config.dotted import get_key, set_key
from hybridrl.errors import ConfigError, ModelError
from hybridrl.forecast.run_forecast import Changes, ForecastError

Config = TypeVar("Config")


def fewest_changes(
    config: Config,
    total: float,
    peak_of: Callable[[Config], float],
    candidates: Callable[[Config], Iterable[Mapping[str, Any]]],
    value_of: Callable[[Config, str], Any] = get_key,
) -> Changes:
    """Return settings that lower the peak, the cheapest first, as few as are needed, and whether they suffice.

    Args:
        config: the settings of the run, which stay as they are.
        total: bytes of a device.
        peak_of: the peak of a run with these settings.
        candidates: keys with their new values, to try in this order. It sees those that were accepted before.
        value_of: returns the value of a key.
    """
    trial = copy.deepcopy(config)

    def lowered(settings: Mapping[str, Any]) -> float:
        """The peak with these settings, which stay set."""
        _set_keys(trial, settings)
        try:
            return peak_of(trial)
        except (ConfigError, ModelError, ForecastError):
            return math.inf  # one does not go together with another setting, or does not exist for this model

    peak = peak_of(trial)
    accepted: list[tuple[Mapping[str, Any], dict[str, Any]]] = []  # with the values before
    for settings in candidates(trial):
        if peak <= total:
            break
        before = {key: value_of(trial, key) for key in settings}
        lower = lowered(settings)
        if lower < 0.99 * peak:
            accepted.append((settings, before))
            peak = lower
        else:
            _set_keys(trial, before)
    fits = peak <= total
    for settings, before in accepted[-2::-1] if fits else []:  # a later one may make an earlier one needless
        if lowered(before) <= total:
            accepted.remove((settings, before))
        else:
            _set_keys(trial, settings)
    return [item for settings, _ in accepted for item in settings.items()], fits


def eight_bit_adam(where: str, optim: OptimConfig) -> dict[str, Any]:
    """The settings by which AdamW keeps its state in 8 bits; none where another class may not take the arguments.

    Args:
        where: the key of `optim`.
    """
    is_usual = (optim.optimizer, optim.optimizer_impl) == ("AdamW", "torch.optim")
    if not is_usual or optim.override_optimizer_config or importlib.util.find_spec("torchao") is None:
        return {}
    return {f"{where}.optimizer": "AdamW8bit", f"{where}.optimizer_impl": "torchao.optim"}


def _set_keys(config: Any, settings: Mapping[str, Any]) -> None:
    """Set the values at dotted paths."""
    for key, value in settings.items():
        set_key(config, key, value)
