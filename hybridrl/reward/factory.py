"""Reward managers made from the configuration, and checks that run before a model is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hybridrl.errors import RewardError
from hybridrl.reward.column_checks import check_rows
from hybridrl.reward.columns import check_keys
from hybridrl.reward.manager import RewardManager, get_reward_manager_cls
from hybridrl.reward.processes.pool import RewardPool
from hybridrl.scored import Unscored
from hybridrl.utils.user_code import load_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import PPOTrainerConfig
    from hybridrl.protocol import DataProto

#: methods of verl's managers that nothing here calls
_METHODS_OF_VERL = ("run_single", "init_class")


def check_reward(config: PPOTrainerConfig) -> None:
    """Refuse a reward function or manager that cannot work.

    The user's file is imported in a process of its own, as the pool will do it.

    Raises:
        RewardError: no such file, function or manager, an import that fails, parameters that do not fit.
    """
    pool = manager_class(config).create_pool(config, num_workers=1)
    if isinstance(pool, RewardPool) and pool.built_in:
        return
    with pool:
        pool.start(wait_for_one=True)


def check_dataset(config: PPOTrainerConfig, dataset: Any) -> None:
    """Refuse data that the built-in scorers cannot score, by file and row. A custom function may need anything.

    Args:
        config: the run's configuration.
        dataset: with `column(name)` and `locate(item)`, as `hybridrl.data.RLHFDataset`; others are checked with
            their first batch.

    Raises:
        RewardError: an unknown data source, or a row without ground truth.
    """
    if manager_class(config).create_pool(config).built_in:
        check_rows(config, dataset)


def create_reward_manager(
    config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase, num_workers: int | None = None
) -> RewardManager:
    """The manager that the configuration names, with pools for its functions (not started yet).

    Args:
        num_workers: processes per function; None: as the settings say.

    Raises:
        RewardError: no such manager, or its settings do not fit.
    """
    cls = manager_class(config)
    pool = cls.create_pool(config) if num_workers is None else cls.create_pool(config, num_workers)
    return cls(config, tokenizer, pool)


def manager_class(config: PPOTrainerConfig) -> type[RewardManager]:
    """The class of `reward.reward_manager`: registered, or from the user's file.

    Raises:
        RewardError: there is no such class, or it cannot be used as a manager here.
    """
    settings = config.reward.reward_manager
    if settings.source == "register":
        return checked_manager(get_reward_manager_cls(settings.name), f"reward.reward_manager.name={settings.name}")
    path, name = settings.module.path, settings.module.name
    key = "reward.reward_manager.module"
    if not path or not name:
        raise RewardError(
            f"reward.reward_manager.source=importlib needs {key}.path and {key}.name; found path={path}, name={name}."
        )
    cls = load_object(path, name, f"{key}.path", f"{key}.name", RewardError)
    return checked_manager(cls, f"{key}.name={name}")


def checked_manager(cls: Any, origin: str) -> type[RewardManager]:
    """Return a class that can be used as a manager.

    Args:
        cls: what the setting names.
        origin: that setting, for messages.

    Raises:
        RewardError: it is no class of this kind, it is called otherwise, or it has methods that nothing here calls, as
            managers written for verl do.
    """
    name = getattr(cls, "__qualname__", repr(cls))
    if not inspect.isclass(cls) or not issubclass(cls, RewardManager):
        raise RewardError(
            f"{origin}: {name} does not derive from hybridrl.reward.RewardManager. Derive it from that class; "
            "what a manager written for verl computes in __call__ or run_single belongs into adjust (one sample's "
            "score) or score_batch (all of them), see docs/reward.md"
        )
    for method in _METHODS_OF_VERL:
        if hasattr(cls, method):
            raise RewardError(
                f"{origin}: {name} defines {method}, which verl calls and hybridrl does not. Override adjust, "
                "score_batch or __call__ (docs/reward.md), or score in a reward function"
            )
    signature = inspect.signature(cls)
    if {"num_examine", "compute_score"} & set(signature.parameters) or not _binds(
        signature, "config", "tokens", "pool"
    ):
        raise RewardError(
            f"{origin}: the constructor of {name} takes {signature}, and is called with (config, tokenizer, pool)"
        )
    signature = inspect.signature(cls.__call__)
    if not _binds(signature, "self", "batch", return_dict=True):
        raise RewardError(
            f"{origin}: __call__ of {name} takes {signature}, and is called with (batch, return_dict=True)"
        )
    return cls


def _binds(signature: inspect.Signature, *arguments: Any, **named: Any) -> bool:
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        return False
    return True


def ask(manager: Callable[..., Any], batch: DataProto) -> dict[str, Any]:
    """Have a manager score a batch; returns what `RewardManager.__call__` describes.

    Raises:
        RewardError: it returns something else; see `complete`.
    """
    name = getattr(manager, "__name__", type(manager).__name__)
    result = complete(manager(batch, return_dict=True), batch, f"the reward manager {name}")
    check_keys(result["reward_extra_info"], f"the reward manager {name}")
    return result


def complete(result: Any, batch: DataProto, source: str = "Sampler.score") -> dict[str, Any]:
    """Return the result of scoring a batch with all of its entries; see `RewardManager.__call__`.

    `reward_extra_info`, `metrics`, `failed` and `missing` may be left out. A row that failed and has no entry in
    `missing` has the reason `grading`, unless `reward.on_error` is `zero`.

    Args:
        result: what was returned.
        batch: what was scored.
        source: what returned it, for errors.

    Raises:
        RewardError: it is something else.
    """
    rewards = result.get("reward_tensor") if isinstance(result, Mapping) else None
    if rewards is None:
        description = (
            f"a dict with {', '.join(map(str, result)) or 'nothing'}" if isinstance(result, Mapping) else type(result)
        )
        raise RewardError(
            f"{source} returned {description} for return_dict=True; it must return a dict with "
            "'reward_tensor' [B, T], and may add 'reward_extra_info', 'metrics' and 'failed' (docs/reward.md)"
        )
    shape = batch.batch["responses"].shape
    is_tensor = isinstance(rewards, torch.Tensor)
    if not is_tensor or rewards.shape != shape:
        raise RewardError(
            f"{source} returned rewards of "
            f"{f'shape {list(rewards.shape)}' if is_tensor else f'type {type(rewards).__name__}'} for responses "
            f"{list(shape)}; it must return a tensor of their shape"
        )
    for key in ("failed", "missing"):
        values = result.get(key)
        if values is not None and len(values) not in (0, len(batch)):
            raise RewardError(f"{source} returned {len(values)} values of {key!r} for {len(batch)} responses")
    missing = result.get("missing") or [None] * len(batch)
    if strange := [entry for entry in missing if not (entry is None or isinstance(entry, Unscored))]:
        raise RewardError(f"{source} returned {strange[0]!r} in 'missing'; use Unscored or None")
    failed = result.get("failed") or [False] * len(batch)
    finite = torch.isfinite(rewards).flatten(1).all(dim=-1).tolist()
    bad = [row for row, good in enumerate(finite) if not good and missing[row] is None and not failed[row]]
    if bad:
        raise RewardError(
            f"{source} returned rewards that are NaN or infinite in rows {bad[:8]}; give these rows an Unscored in "
            "'missing' if they have no reward"
        )
    extra = dict(result.get("reward_extra_info") or {})
    for column, values in extra.items():
        if len(values) != len(batch):
            raise RewardError(f"{source} returned {len(values)} values of {column!r} for {len(batch)} responses")
    check_keys(extra, source, of_roles=True)
    return {"metrics": {}, **result, "reward_extra_info": extra, "missing": list(missing)}
