"""Tokens by which models end a turn, as text."""

import re

#: the tokens of the families that chat templates are known of; a text may end with several
_ENDS = re.compile(
    r"(?:\s*(?:<\|(?:im_end|endoftext|end_of_text|eot_id|eom_id|end|return|call|user|observation)\|>"
    r"|<｜end▁of▁sentence｜>|<end_of_turn>|<turn\|>|</s>|\[EOS\]))+\s*\Z"
)


def without_ends(text: str) -> str:
    """The text without tokens behind it that end the turn."""
    return _ENDS.sub("", text)
