"""`verl.trainer.ppo.utils`."""

from typing import Any

from hybridrl import data
from hybridrl.single_controller.base import Worker
from hybridrl.trainer.ppo.role_groups import Role
from hybridrl.verl_compat.utils.dataset.rl_dataset import with_defaults

__all__ = ["Role", "WorkerType", "create_rl_dataset", "create_rl_sampler", "need_critic", "need_reference_policy"]

WorkerType = type[Worker]


def need_critic(config: Any) -> bool:
    """Return whether the run has a critic, for settings made by `hybridrl.config.load_config`."""
    return bool(config.use_critic)


def need_reference_policy(config: Any) -> bool:
    """Return whether the run has a reference policy, for settings made by `hybridrl.config.load_config`."""
    return bool(config.use_reference)


def create_rl_dataset(
    data_paths: str | list[str],
    data_config: Any,
    tokenizer: Any,
    processor: Any = None,
    is_train: bool = True,
    max_samples: int = -1,
) -> Any:
    """Create the prompts of files: an `RLHFDataset`, or the class that `data_config.custom_cls` names."""
    key = "data.train_files" if is_train else "data.val_files"
    return data.create_rl_dataset(data_paths, with_defaults(data_config), tokenizer, max_samples, key, processor)


def create_rl_sampler(data_config: Any, dataset: Any) -> Any:
    """Create the order of the prompts, or the sampler that `data_config.sampler` names."""
    return data.create_sampler(with_defaults(data_config), dataset)
