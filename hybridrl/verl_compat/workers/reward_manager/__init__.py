"""`verl.workers.reward_manager`: managers derive from `hybridrl.reward.RewardManager`."""

from hybridrl.reward.manager import BatchRewardManager, DAPORewardManager, get_reward_manager_cls, register
from hybridrl.reward.manager import RewardManager as NaiveRewardManager

__all__ = ["BatchRewardManager", "DAPORewardManager", "NaiveRewardManager", "get_reward_manager_cls", "register"]
