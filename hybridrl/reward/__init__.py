"""Reward: scorers by data source, custom functions, managers, and the pool of processes that runs them.

The names below are imported on first use: the pool's processes import this package and must start in milliseconds, so
nothing here imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hybridrl.errors import RewardError

if TYPE_CHECKING:
    from hybridrl.reward.factory import check_dataset, check_reward, create_reward_manager
    from hybridrl.reward.function import RewardFunction
    from hybridrl.reward.manager import RewardManager, get_reward_manager_cls, register, register_reward_manager
    from hybridrl.reward.objects import reward_settings
    from hybridrl.reward.processes.pool import RewardPool
    from hybridrl.reward.score import default_compute_score
    from hybridrl.reward.signature import Sample

_HOMES = {
    "RewardFunction": "function",
    "RewardManager": "manager",
    "RewardPool": "processes.pool",
    "Sample": "signature",
    "check_dataset": "factory",
    "check_reward": "factory",
    "create_reward_manager": "factory",
    "default_compute_score": "score",
    "get_reward_manager_cls": "manager",
    "register": "manager",
    "register_reward_manager": "manager",
    "reward_settings": "objects",
}

__all__ = [
    "RewardError",
    "RewardFunction",
    "RewardManager",
    "RewardPool",
    "Sample",
    "check_dataset",
    "check_reward",
    "create_reward_manager",
    "default_compute_score",
    "get_reward_manager_cls",
    "register",
    "register_reward_manager",
    "reward_settings",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
