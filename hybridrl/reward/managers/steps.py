"""The manager `steps`: process rewards, a score for each step of a response, placed where the step ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hybridrl.reward.manager import RewardManager, RowScore, register_reward_manager
from hybridrl.reward.positions import response_lengths, tensors_of
from hybridrl.reward.processes.outcome import Outcome, without_score
from hybridrl.reward.response_steps import StepPlaces, steps_of
from hybridrl.reward.signature import Sample
from hybridrl.scored import Reason, Unscored

if TYPE_CHECKING:
    from hybridrl.protocol import DataProto

_NAME = "step_scores"


@register_reward_manager("steps", settings="hybridrl.config.schema.reward:StepsConfig")
class StepsRewardManager(RewardManager):
    """Like `naive`, with the scores of single steps that a function returns as `step_scores`, a list of numbers.

    The steps of a response are the parts of its text between separators. With step scores p_k and the weight w, w * p_k
    is added at the last generated token of step k, and the score stays at the last generated token. A list of another
    length than there are steps is no score.

    Settings (`reward.reward_kwargs`): `separator`, `weight`.
    """

    @cached_property
    def places(self) -> StepPlaces:
        return StepPlaces(self.tokenizer, self.settings.separator)

    def _scored(self, outcome: Outcome, sample: Sample, length: int) -> RowScore:
        if outcome.unscored is None and (fault := self._fault(outcome, sample)) is not None:
            outcome = without_score(Unscored(Reason.GRADING, fault), outcome.seconds)
        return super()._scored(outcome, sample, length)

    def collect(self, batch: DataProto, scored: Sequence[RowScore]) -> dict[str, Any]:
        """The rewards of the rows, those of their steps included; see `RewardManager.collect`."""
        result = super().collect(batch, scored)
        tensors, rewards = tensors_of(batch), result["reward_tensor"]
        lengths, mask = response_lengths(batch).tolist(), tensors.get("response_mask", None)
        for row, row_score in enumerate(scored):
            lists = _lists_of(row_score.outcome)
            if row_score.outcome.unscored is not None or not lists:
                continue
            tokens = tensors["responses"][row, : lengths[row]].tolist()
            own = [1] * len(tokens) if mask is None else mask[row, : lengths[row]].tolist()
            for scores in lists:
                for place, score in zip(self.places(tokens, own), scores, strict=True):
                    rewards[row, place] += self.settings.weight * score
        return result

    def _fault(self, outcome: Outcome, sample: Sample) -> str | None:
        count = len(steps_of(sample.solution_str, self.settings.separator))
        for scores in _lists_of(outcome):
            if not isinstance(scores, list) or not all(_is_number(score) for score in scores):
                return f"{_NAME} is {str(scores)[:100]}, and must be a list of numbers"
            if len(scores) != count:
                return f"{len(scores)} {_NAME} for {count} steps between {self.settings.separator!r}"
        return None


def _lists_of(outcome: Outcome) -> list[Any]:
    """The step scores of a function, or of each part of several."""
    return [value for name, value in (outcome.extra or {}).items() if name.rpartition("/")[2] == _NAME]


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and math.isfinite(value)
