"""The manager `steps`: process rewards, a score for each step of a response, placed where the step ends."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

from hybridrl.reward.manager import RewardManager, Scored, register_reward_manager
from hybridrl.reward.positions import response_lengths, tensors_of
from hybridrl.reward.processes.outcome import Outcome, without_score
from hybridrl.reward.signature import Sample
from hybridrl.utils.token_text import TokenTexts
from hybridrl.verdict import NoVerdict, Reason

if TYPE_CHECKING:
    from hybridrl.protocol import DataProto

_NAME = "step_scores"


@register_reward_manager("steps", settings="hybridrl.config.schema.reward:StepsConfig")
class StepsRewardManager(RewardManager):
    """Like `naive`, with the scores of single steps that a function returns as `step_scores`, a list of numbers.

    The steps of a response are the parts of its text between separators. With step scores p_k and the weight w, w * p_k
    is added at the last generated token of step k, and the score stays at the last generated token. A list of another
    length than there are steps is no verdict.

    Settings (`reward.reward_kwargs`): `separator`, `weight`.
    """

    @cached_property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    def _scored(self, outcome: Outcome, sample: Sample, length: int) -> Scored:
        if outcome.no_verdict is None and (fault := self._fault(outcome, sample)) is not None:
            outcome = without_score(NoVerdict(Reason.GRADING, fault), outcome.seconds)
        return super()._scored(outcome, sample, length)

    def collect(self, batch: DataProto, scored: Sequence[Scored]) -> dict[str, Any]:
        """The rewards of the rows, those of their steps included; see `RewardManager.collect`."""
        result = super().collect(batch, scored)
        tensors, rewards = tensors_of(batch), result["reward_tensor"]
        lengths, mask = response_lengths(batch).tolist(), tensors.get("response_mask", None)
        for row, one in enumerate(scored):
            lists = _lists_of(one.outcome)
            if one.outcome.no_verdict is not None or not lists:
                continue
            tokens = tensors["responses"][row, : lengths[row]].tolist()
            own = [1] * len(tokens) if mask is None else mask[row, : lengths[row]].tolist()
            for scores in lists:
                for place, score in zip(self._ends(tokens, own), scores, strict=True):
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

    def _ends(self, tokens: Sequence[int], own: Sequence[int]) -> list[int]:
        """The last generated token of each step; that of an earlier step where it has none."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        length = self._lengths(tokens, text)
        last = list(accumulate((place if mine else -1 for place, mine in enumerate(own)), max, initial=-1))
        ends, end = [], 0
        for step in steps_of(text, self.settings.separator):
            end += len(step)
            # the first tokens, at least one, whose text reaches the end of the step
            count = bisect_left(range(len(tokens)), end, lo=min(1, len(tokens)), key=length)
            ends.append(max(last[count], 0))
        return ends

    def _lengths(self, tokens: Sequence[int], text: str) -> Callable[[int], int]:
        """A function that returns the length of the text of the first so many tokens.

        The texts of single tokens joined are usually the text of all, with a space before it that decoding drops. Where
        a tokenizer changes the text that it joins, for example removes spaces, first tokens are decoded one by one.
        """
        special = {token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special}
        shown = iter(self._texts([token for token in tokens if token not in special]))
        texts = ["" if token in special else next(shown) for token in tokens]
        joined = "".join(texts)
        dropped = len(joined) - len(text)
        if joined[dropped:] == text and not joined[:dropped].strip():
            sums = list(accumulate(map(len, texts), initial=-dropped))
            return sums.__getitem__

        @cache
        def length(count: int) -> int:
            first = self.tokenizer.decode(tokens[:count], skip_special_tokens=True)
            # a part of a character at the end is not part of the text
            return sum(takewhile(bool, (own == whole for own, whole in zip(first, text, strict=False))))

        return length


def steps_of(text: str, separator: str) -> list[str]:
    """The steps of a text, each with the separators behind it; joined they are the text."""
    steps: list[str] = []
    for part in text.split(separator):
        if part.strip() or not steps:
            steps.append(part + separator)
        else:
            steps[-1] += part + separator
    steps[-1] = steps[-1][: len(steps[-1]) - len(separator)]
    return steps


def _lists_of(outcome: Outcome) -> list[Any]:
    """The step scores of a function, or of each part of several."""
    return [value for name, value in (outcome.extra or {}).items() if name.rpartition("/")[2] == _NAME]


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and math.isfinite(value)
