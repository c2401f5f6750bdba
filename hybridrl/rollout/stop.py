"""Stop strings on a stream of tokens, for engines that look at tokens alone."""

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Tells when a response holds one of some strings.

    Args:
        tokenizer: decodes token ids to text.
        strings: a response ends with the token that completes one of these.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        # A token is a byte at least, so a string that ends with the last token starts among so many.
        self._window = max((len(string.encode()) for string in strings), default=0)

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token completed a string; the tokens before it have been looked at."""
        if not self._strings:
            return False
        text = self._tokenizer.decode(list(token_ids[-self._window :]), skip_special_tokens=False)
        return any(string in text for string in self._strings)
