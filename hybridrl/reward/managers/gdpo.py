"""verl's manager `gdpo`: rewards of several components, for `algorithm.adv_estimator=gdpo`."""

from typing import Any

from hybridrl.errors import RewardError
from hybridrl.reward.manager import RewardManager, register_reward_manager
from hybridrl.reward.signature import Sample


@register_reward_manager("gdpo", settings="hybridrl.config.schema.reward:GdpoManagerConfig")
class GDPORewardManager(RewardManager):
    """Like `naive`, and checks that each sample has every component of `algorithm.gdpo_reward_keys`, a number.

    The estimator reads the components from the columns of the batch, which every manager fills. This one tells at the
    first sample which component is missing.
    """

    def adjust(self, score: float, extra: dict[str, Any], sample: Sample, length: int) -> tuple[float, dict[str, Any]]:
        for name in self.config.algorithm.gdpo_reward_keys:
            value = extra.get(name)
            if not isinstance(value, (int, float)):
                wanted = list(self.config.algorithm.gdpo_reward_keys)
                raise RewardError(
                    f"{self.pool.label} returned {name}={value!r}; reward.reward_manager.name=gdpo needs a number for "
                    f"each of algorithm.gdpo_reward_keys={wanted}, and found {', '.join(extra) or 'no dict'}"
                )
        return score, extra
