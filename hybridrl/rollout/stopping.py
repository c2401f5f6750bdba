"""Stop strings: where in a growing list of tokens the text of one is complete."""

from collections.abc import Callable, Sequence

# Tokens beyond those of the string itself: the first of a window may decode to half a character or lose its space.
_MARGIN = 8


class StopStrings:
    """Watches one response.

    A token is at least a byte long, so a string stands within as many of the last tokens as it has bytes; no more than
    that is decoded.

    Args:
        decode: the text of some tokens, special tokens included.
        strings: the first of them that is complete ends the response.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], strings: Sequence[str]) -> None:
        self._decode = decode
        self._strings = tuple(strings)
        self._window = max((len(text.encode()) for text in strings), default=0) + _MARGIN
        self._seen = 0

    def end(self, token_ids: Sequence[int]) -> int | None:
        """How long the response is, the token that completes a string included; None while there is none.

        Args:
            token_ids: all tokens so far; those of the last call are not looked at again.
        """
        start, self._seen = self._seen, len(token_ids)
        if not self._has_one(token_ids[max(0, start - self._window) :]):
            return None
        for count in range(start + 1, len(token_ids) + 1):
            if self._has_one(token_ids[max(0, count - self._window) : count]):
                return count
        return None

    def _has_one(self, token_ids: Sequence[int]) -> bool:
        if not self._strings or not token_ids:
            return False
        text = self._decode(token_ids)
        return any(string in text for string in self._strings)
