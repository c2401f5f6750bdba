"""Settings of verl's `fully_async_policy.fully_async_main`, in the words of the one trainer here."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridrl.config.convert import show

_TRAINING = "async_training"
#: verl's defaults
_DEFAULTS: Mapping[str, Any] = {
    f"{_TRAINING}.staleness_threshold": 0.1,
    f"{_TRAINING}.trigger_parameter_sync_step": 4,
    f"{_TRAINING}.require_batches": 1,
    f"{_TRAINING}.partial_rollout": True,
    f"{_TRAINING}.use_rollout_log_probs": True,
    f"{_TRAINING}.compute_prox_log_prob": False,
    "rollout.total_rollout_steps": None,
}
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
_STEPS = "trainer.total_training_steps"
_LOTS = 8  # of which the prompts ahead of training are drawn: a lot is answered at once


@dataclass
class FullyAsyncKeys:
    """The meaning of the settings of verl's program.

    Attributes:
        keys: the values that they stand for, by key; none where none was written, or one is wrong.
        origin: where these come from, as a clause to append to a key.
        notices: what the user is told.
        faults: a sentence for each setting that cannot be used.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    origin: str = ""
    notices: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def keys_of_fully_async(
    written: Mapping[str, tuple[Any, str]], value_of: Callable[[str], Any], origins: Mapping[str, str]
) -> FullyAsyncKeys:
    """Return the keys that verl's settings stand for.

    With the mini-batch size m, a step trains on P = m `require_batches` `trigger_parameter_sync_step` prompts, sends
    its weights once, and S = `staleness_threshold` steps of prompts are answered ahead of it. verl draws
    int(P (1 + S)) prompts between two transfers, and so does the sampler here.

    Args:
        written: values of verl's settings, with the place where each was written.
        value_of: returns the value of a key so far.
        origins: the keys that were set by themselves, with the place.
    """
    if not written:
        return FullyAsyncKeys()
    meaning = FullyAsyncKeys(origin=f" (from {', '.join(written)})")
    settings = {**_DEFAULTS, **{name: value for name, (value, _) in written.items()}}
    for name, kind in _misfits(written, settings):
        meaning.faults.append(f"{name}={show(settings[name])}{written[name][1]}: must be {kind}")
    mini = value_of(_MINI_BATCH)
    if meaning.faults or isinstance(mini, bool) or not isinstance(mini, int):
        return meaning
    keys = _keys(settings, mini, value_of)
    meaning.keys = {key: value for key, value in keys.items() if key not in (_BYPASS, _STEPS) or key not in origins}
    words = ", ".join(f"{name}={show(value)}" for name, (value, _) in written.items())
    text = " ".join(f"{key}={show(value)}" for key, value in meaning.keys.items())
    notice = f"asynchronous training as verl's fully_async_main names it ({words}) is {text}"
    before = {key: value_of(key) for key, value in meaning.keys.items() if key in origins and value_of(key) != value}
    if before:
        notice += f". It replaces {', '.join(f'{key}={show(value)}' for key, value in before.items())}"
    meaning.notices.append(notice)
    return meaning


def _keys(settings: Mapping[str, Any], mini: int, value_of: Callable[[str], Any]) -> dict[str, Any]:
    """Return the keys for all settings and the size of a mini-batch."""
    parts = settings[f"{_TRAINING}.require_batches"] * settings[f"{_TRAINING}.trigger_parameter_sync_step"]
    prompts, ahead = mini * parts, float(settings[f"{_TRAINING}.staleness_threshold"])
    keys: dict[str, Any] = {
        "data.train_batch_size": prompts,
        "data.gen_batch_size": _lot(value_of("data.gen_batch_size"), prompts, ahead),
        "trainer.v1.trainer_mode": "separate_async" if ahead else "sync",
    }
    if ahead:
        keys["trainer.v1.separate_async.num_warmup_batches"] = ahead
        keys["trainer.v1.drain"] = not settings[f"{_TRAINING}.partial_rollout"]
        recomputes = settings[f"{_TRAINING}.compute_prox_log_prob"]
        keys[_BYPASS] = settings[f"{_TRAINING}.use_rollout_log_probs"] and not recomputes
    if not value_of("actor_rollout_ref.rollout.nnodes"):
        keys["actor_rollout_ref.rollout.nnodes"] = 1
    if (total := settings["rollout.total_rollout_steps"]) is not None:
        keys[_STEPS] = max(1, total // prompts)
    return keys


def _lot(lot: Any, prompts: int, ahead: float) -> int | None:
    """Return the prompts that are drawn at once; verl's only value, 1, would answer each in a call of its own."""
    if lot not in (None, 1) or not ahead:
        return None if lot == 1 else lot
    room = math.floor((1 + ahead) * prompts) - (prompts - 1)
    return max(1, room // _LOTS)


def _misfits(written: Mapping[str, tuple[Any, str]], settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings whose values are of a wrong kind, with the right one."""
    for name in written:
        value, default = settings[name], _DEFAULTS[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(default, bool):
            if not isinstance(value, bool):
                yield name, "true or false"
        elif isinstance(default, float):
            if not is_number or value < 0:
                yield name, "a number from 0"
        elif not (default is None and value is None) and (not is_number or value != int(value) or value < 1):
            yield name, "a whole number from 1"
