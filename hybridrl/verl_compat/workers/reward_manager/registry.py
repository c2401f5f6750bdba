"""`verl.workers.reward_manager.registry`."""

from hybridrl.reward.manager import REGISTRY as REWARD_MANAGER_REGISTRY
from hybridrl.reward.manager import get_reward_manager_cls, register

__all__ = ["REWARD_MANAGER_REGISTRY", "get_reward_manager_cls", "register"]
