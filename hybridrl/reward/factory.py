"""Reward managers made from the configuration, and checks that run before a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridrl.errors import RewardError
from hybridrl.reward.function import PATH_KEY, RewardFunction
from hybridrl.reward.processes.pool import RewardPool
from hybridrl.utils.user_code import load_class

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import PPOTrainerConfig
    from hybridrl.reward.manager import RewardManager


def reward_function(config: PPOTrainerConfig, manager: type[RewardManager] | None = None) -> RewardFunction:
    """The reward function that the configuration names."""
    custom = config.reward.custom_reward_function
    if custom.path is None and custom.name is not None:
        raise RewardError(
            f"reward.custom_reward_function.name={custom.name} is set but {PATH_KEY} is not. Set it to the file that "
            f"holds {custom.name}."
        )
    return RewardFunction(
        custom.path, custom.name, dict(custom.reward_kwargs or {}), manager.form if manager else "sample"
    )


def check_reward(config: PPOTrainerConfig) -> None:
    """Refuse a reward function or manager that cannot work.

    The user's file is imported in a process of its own, as the pool will do it.

    Raises:
        RewardError: no such file, function or manager, an import that fails, parameters that do not fit.
    """
    function = reward_function(config, manager_class(config))
    if function.path is None:
        return
    with RewardPool(function, num_workers=1, timeout_s=config.reward.timeout_s) as pool:
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
    from hybridrl.reward.manager import missing_ground_truth
    from hybridrl.reward.score import check_data_source

    if config.reward.custom_reward_function.path is not None or not hasattr(dataset, "column"):
        return
    table = dataset.table
    key = config.data.reward_fn_key
    sources = dataset.column(key) if key in table.columns else [None] * len(dataset)
    references = dataset.column("reward_model") if "reward_model" in table.columns else [None] * len(dataset)
    known: set[str] = set()
    for item, (source, reference) in enumerate(zip(sources, references, strict=True)):
        try:
            if source not in known:
                check_data_source(source, key)
                known.add(source)
            if not isinstance(reference, dict) or reference.get("ground_truth") is None:
                raise RewardError(missing_ground_truth(source))
        except RewardError as error:
            raise RewardError(f"{dataset.locate(item)}: {error}") from None


def create_reward_manager(config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase) -> RewardManager:
    """The manager that the configuration names, with a pool for its function (not started yet).

    Raises:
        RewardError: no such manager, or its settings do not fit.
    """
    cls = manager_class(config)
    pool = RewardPool(reward_function(config, cls), config.reward.num_workers, config.reward.timeout_s)
    return cls(config, tokenizer, pool)


def manager_class(config: PPOTrainerConfig) -> type[RewardManager]:
    """The class of `reward.reward_manager`: registered, or from the user's file.

    Raises:
        RewardError: there is no such class.
    """
    from hybridrl.reward.manager import RewardManager, get_reward_manager_cls

    settings = config.reward.reward_manager
    if settings.source == "register":
        return get_reward_manager_cls(settings.name)
    path, name = settings.module.path, settings.module.name
    key = "reward.reward_manager.module"
    if not path or not name:
        raise RewardError(
            f"reward.reward_manager.source=importlib needs {key}.path and {key}.name; found path={path}, name={name}."
        )
    return load_class(path, name, f"{key}.path", f"{key}.name", RewardManager, RewardError)
