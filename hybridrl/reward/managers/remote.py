"""The manager `remote`: a service scores the samples, over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridrl.reward.function import RewardFunction
from hybridrl.reward.manager import RewardManager, register_reward_manager
from hybridrl.reward.pools import service_pool

if TYPE_CHECKING:
    from hybridrl.config import PPOTrainerConfig
    from hybridrl.reward.scorers import SampleScorer


@register_reward_manager("remote", settings="hybridrl.config.schema.reward:RemoteScoresConfig")
class RemoteRewardManager(RewardManager):
    """Like `naive`, with the scores of a service (`hybridrl.reward.remote_scores`) in place of a function's.

    Without `reward.reward_kwargs.url` the functions run in the pool's processes, as verl's `remote` runs them in
    processes of Ray.
    """

    @classmethod
    def create_pool(cls, config: PPOTrainerConfig, num_workers: int | None = None) -> SampleScorer:
        """The pool that asks the service."""
        settings = cls.read_settings(config)
        if settings.url is None:
            return super().create_pool(config, num_workers)
        arguments: dict[str, Any] = {name: settings[name] for name in settings.keys()}
        arguments["timeout"] = config.reward.timeout_s
        key = "reward.reward_kwargs"
        function = RewardFunction("pkg://hybridrl.reward.remote_scores", "compute_score", arguments, key=key)
        return service_pool(config.reward, function, config.reward.timeout_s)
