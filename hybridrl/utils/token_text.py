"""The text that each token of a response adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "�"  # what tokenizers decode a part of a character to
_LONGEST = 4  # tokens that a character can have: bytes of a character in UTF-8


class TokenTexts:
    """Decodes tokens one by one, so that their texts joined are the text of all.

    A token that holds only a part of a character has no text of its own: the token that completes the character has
    it. Bytes that are no character at all become a replacement character.

    Args:
        tokenizer: of the policy.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[tuple[int, ...], str] = {}
        # Decoded alone, or first, a token loses the space that stands before it.
        self._anchor = list(tokenizer("a", add_special_tokens=False)["input_ids"])[-1:]
        self._start = len(self._decode(self._anchor))

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """The texts of tokens that follow one another; special tokens are shown by name."""
        texts: list[str] = []
        waiting: list[int] = []
        for token in ids:
            waiting.append(token)
            texts.append("")
            text = self._text(tuple(waiting))
            if not text.endswith(_INCOMPLETE):
                texts[-1], waiting = text, []
            elif len(waiting) == _LONGEST:  # what is incomplete at the end began behind the first of them
                rest = self._text(tuple(waiting[1:]))
                texts[-_LONGEST] = text.removesuffix(rest) if text.endswith(rest) else _INCOMPLETE
                waiting = waiting[1:]
        if waiting:
            texts[-1] = self._text(tuple(waiting))
        return texts

    def _text(self, ids: tuple[int, ...]) -> str:
        if ids not in self._cache:
            self._cache[ids] = self._decode([*self._anchor, *ids])[self._start :]
        return self._cache[ids]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(ids),
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return text
