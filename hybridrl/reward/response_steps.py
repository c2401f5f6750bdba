"""The steps of a response, and the tokens where they end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, takewhile
from typing import Any

from hybridrl.utils.token_text import TokenTexts


def steps_of(text: str, separator: str) -> list[str]:
    """The steps of a text, each with the separators after it; joined they are the text."""
    steps: list[str] = []
    for part in text.split(separator):
        if part.strip() or not steps:
            steps.append(part + separator)
        else:
            steps[-1] += part + separator
    steps[-1] = steps[-1][: len(steps[-1]) - len(separator)]
    return steps


class StepPlaces:
    """Finds where the steps of a response end among its tokens.

    Args:
        tokenizer: of the policy.
        separator: text between two steps.
    """

    def __init__(self, tokenizer: Any, separator: str) -> None:
        self._tokenizer, self._separator = tokenizer, separator
        self._texts = TokenTexts(tokenizer)

    def __call__(self, tokens: Sequence[int], own: Sequence[int]) -> list[int]:
        """The last generated token of each step; that of an earlier step where it has none."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        length = self._lengths(tokens, text)
        last = list(accumulate((place if is_own else -1 for place, is_own in enumerate(own)), max, initial=-1))
        ends, end = [], 0
        for step in steps_of(text, self._separator):
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
        special = {token for token, added in self._tokenizer.added_tokens_decoder.items() if added.special}
        shown_texts = iter(self._texts([token for token in tokens if token not in special]))
        texts = ["" if token in special else next(shown_texts) for token in tokens]
        joined = "".join(texts)
        dropped = len(joined) - len(text)
        if joined[dropped:] == text and not joined[:dropped].strip():
            sums = list(accumulate(map(len, texts), initial=-dropped))
            return sums.__getitem__

        @cache
        def length(count: int) -> int:
            first = self._tokenizer.decode(tokens[:count], skip_special_tokens=True)
            # a part of a character at the end is not part of the text
            return sum(takewhile(bool, (own == whole for own, whole in zip(first, text, strict=False))))

        return length
