"""Stop strings in a stream of tokens, for engines that see only tokens."""

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Finds out when a response contains one of some strings.

    Args:
        tokenizer: decodes token ids to text.
        strings: a response ends with the token that completes one of these.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        # A token has at least one byte, so a string that ends with the last token starts within this many.
        self._window = max((len(string.encode()) for string in strings), default=0)

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token completed a string; earlier tokens are assumed to have been checked."""
        if not self._strings:
            return False
        text = self._tokenizer.decode(list(token_ids[-self._window :]), skip_special_tokens=False)
        return any(string in text for string in self._strings)

    def first_end(self, token_ids: Sequence[int], checked: int) -> int | None:
        """Return the number of tokens up to the one that completes a stop string; None if none does.

        Args:
            token_ids: all tokens so far.
            checked: the number of leading tokens that were checked before.
        """
        for count in range(checked + 1, len(token_ids) + 1):
            if self.ends(token_ids[max(0, count - self._window) : count]):
                return count
        return None
