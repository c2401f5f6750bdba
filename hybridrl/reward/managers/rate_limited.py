"""verl's manager `rate_limited`, for functions that ask a service with limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridrl.reward.manager import RewardManager, register_reward_manager
from hybridrl.reward.scorers import NoFunction, Rate, RateLimited

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.config import PPOTrainerConfig
    from hybridrl.reward.scorers import SampleScorer


@register_reward_manager("rate_limited", settings="hybridrl.config.schema.reward:RateLimitConfig")
class RateLimitedRewardManager(RewardManager):
    """Like `naive`, with limits on the samples that begin, over all reward processes of the run.

    Settings (`reward.reward_kwargs`): `max_rpm` and `max_tpm`, requests and tokens within any 60 seconds;
    `max_concurrent`; `estimated_tokens_per_request`.
    """

    def __init__(self, config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase, pool: SampleScorer) -> None:
        super().__init__(config, tokenizer, pool)
        limits = self.settings
        if not isinstance(pool, (NoFunction, RateLimited)):
            rate = Rate(limits.max_rpm, limits.max_tpm)
            tokens = float(limits.estimated_tokens_per_request)
            self.pool = RateLimited(pool, rate, limits.max_concurrent, lambda sample: tokens)
