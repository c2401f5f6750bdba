"""verl's manager `prime`: samples are scored in parallel processes, each with a time limit."""

from typing import Any

from hybridrl.reward.manager import RewardManager, register_reward_manager
from hybridrl.reward.signature import Sample


@register_reward_manager("prime")
class PrimeRewardManager(RewardManager):
    """Like `naive`, which scores in parallel processes with time limits, too; each sample also has `acc`, its score.

    A sample that fails or takes too long follows `reward.on_error` and `algorithm.missing`; in verl it scores 0.
    """

    every_score_is_accuracy = True

    def adjust(self, score: float, extra: dict[str, Any], sample: Sample, length: int) -> tuple[float, dict[str, Any]]:
        return score, {"acc": score, **extra}
