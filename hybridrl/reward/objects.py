"""Reward functions handed over as Python objects: lambdas, closures and functions of a notebook.

The processes that score are programs of their own, so a function is written to a file with cloudpickle, and the
configuration names that file like any other. A run can so be resumed, or repeated from the command line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.config.short_table import split_place
from hybridrl.errors import RewardError
from hybridrl.utils.pickled_objects import write_object

#: a function, or the path of a Python file, `FILE.py` or `FILE.py:NAME`
Reward = Callable[..., Any] | str | Path


def reward_settings(
    reward: Reward | Sequence[Reward] | Mapping[str, Reward],
    folder: str | Path,
    weights: Sequence[float] | Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the settings of `reward` that make a run score with these functions.

    Args:
        reward: a function, or the path of a Python file (`FILE.py` or `FILE.py:NAME`); a list of them; or a mapping of
            names to them. Functions of a list are called by their own names.
        folder: where functions are written, one file `NAME-HASH.pkl` each; it is created.
        weights: a number per function, in the same order or by name; None: 1 each.

    Returns:
        `{"custom_reward_function": {...}}` for one function, `{"functions": {NAME: {...}}}` for several.

    Raises:
        RewardError: something is not a function or cannot be pickled, or the weights do not fit.
    """
    if callable(reward) or isinstance(reward, str | Path):
        if weights is not None:
            raise RewardError("reward weights are given for a single function; weights need a list of functions")
        return {"custom_reward_function": _entry(_name_of(reward, 0), reward, Path(folder))}
    named = _named(reward)
    factors = _weights(list(named), weights)
    return {
        "functions": {
            name: {**_entry(name, function, Path(folder)), "weight": factors[name]} for name, function in named.items()
        }
    }


def _entry(name: str, reward: Any, folder: Path) -> dict[str, Any]:
    if isinstance(reward, str | Path):
        path, function = split_place(str(reward))
        return {"path": path, "name": function} if function else {"path": path}
    if not callable(reward):
        raise RewardError(
            f"reward {name!r} is {type(reward).__name__}; give a function, or the path of a Python file that holds one"
        )
    try:
        return {"path": str(write_object(reward, folder, name))}
    except Exception as error:  # objects that the function refers to may raise anything
        raise RewardError(
            f"reward function {name!r} cannot be sent to the processes that score ({type(error).__name__}: {error}). "
            "It refers to an object that exists in this process only, such as a lock, an open file or a client: create "
            "that inside the function."
        ) from error


def _named(rewards: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(rewards, Mapping):
        bad = next((name for name in rewards if not str(name).isidentifier()), None)
        if bad is not None:
            raise RewardError(f"reward={{{bad!r}: ...}}: a name is a word of letters, digits and underscores")
        return dict(rewards)
    if not isinstance(rewards, Sequence) or not rewards:
        raise RewardError(
            f"reward is {type(rewards).__name__}; give a function, the path of a Python file, or a list or dict of them"
        )
    named: dict[str, Any] = {}
    for number, reward in enumerate(rewards):
        name = _name_of(reward, number)
        if name in named:
            raise RewardError(
                f"two reward functions are called {name!r}; give them names: reward={{NAME: FUNCTION, ...}}"
            )
        named[name] = reward
    return named


def _name_of(reward: Any, number: int) -> str:
    """Return a function's own name, as far as a setting can be called so."""
    if isinstance(reward, str | Path):
        path, _, function = str(reward).partition(":")
        name = function or Path(path).stem
    else:
        name = getattr(reward, "__name__", type(reward).__name__)
    return re.sub(r"\W+", "_", name.replace("<lambda>", f"reward_{number + 1}")).strip("_") or f"reward_{number + 1}"


def _weights(names: Sequence[str], weights: Sequence[float] | Mapping[str, float] | None) -> dict[str, float]:
    if weights is None:
        return dict.fromkeys(names, 1.0)
    if isinstance(weights, Mapping):
        unknown = [name for name in weights if name not in names]
        if unknown:
            raise RewardError(
                f"weight of {unknown[0]!r}: there is no such reward function; there are {', '.join(names)}"
            )
        return {name: float(weights.get(name, 1.0)) for name in names}
    if len(weights) != len(names):
        raise RewardError(f"{len(weights)} weights for {len(names)} reward functions; give one weight for each")
    return dict(zip(names, map(float, weights), strict=True))
