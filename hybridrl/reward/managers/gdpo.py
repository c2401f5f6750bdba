"""verl's manager `gdpo`: rewards of several components, for `algorithm.adv_estimator=gdpo`."""

from dataclasses import replace

from hybridrl.errors import RewardError
from hybridrl.reward.manager import RewardManager, RowScore, register_reward_manager
from hybridrl.reward.processes.outcome import Outcome
from hybridrl.reward.signature import Sample


@register_reward_manager("gdpo", settings="hybridrl.config.schema.reward:GdpoManagerConfig")
class GDPORewardManager(RewardManager):
    """Like `naive`, and checks that each sample has every component of `algorithm.gdpo_reward_keys`, a number.

    The estimator reads the components from the columns of the batch, which every manager fills. This one tells at the
    first sample which component is missing. A session that brings its reward along brings its components along, too
    (`Scored.extra`); the estimator checks those. Where
    `reward.on_error=zero` makes a failure score 0, its components are 0.
    """

    def _scored(self, outcome: Outcome, sample: Sample, length: int) -> RowScore:
        scored = super()._scored(outcome, sample, length)
        if outcome.brought_along:
            return scored
        if outcome.unscored is not None:
            zeros = dict.fromkeys(self.config.algorithm.gdpo_reward_keys, 0.0)
            return scored if scored.outcome.unscored is not None else replace(scored, extra=zeros | scored.extra)
        for name in self.config.algorithm.gdpo_reward_keys:
            value = scored.extra.get(name)
            if not isinstance(value, (int, float)):
                keys = list(self.config.algorithm.gdpo_reward_keys)
                raise RewardError(
                    f"{self.pool.label} returned {name}={value!r}; reward.reward_manager.name=gdpo needs a number for "
                    f"each of algorithm.gdpo_reward_keys={keys}, and found {', '.join(scored.extra) or 'no dict'}"
                )
        return scored
