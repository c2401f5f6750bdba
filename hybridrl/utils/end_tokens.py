"""Tokens by which models end a turn, as text."""

import re

#: of the families that chat templates are known of
END_TOKENS = (
    *(f"<|{name}|>" for name in ["im_end", "endoftext", "end_of_text", "eot_id", "eom_id", "end", "return", "call"]),
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
    "<turn|>",
    "</s>",
    "[EOS]",
)
#: roles whose opening ends the turn before
_NEXT_ROLES = ("<|user|>", "<|observation|>")
_ENDS = re.compile(rf"(?:\s*(?:{'|'.join(map(re.escape, (*END_TOKENS, *_NEXT_ROLES)))}))+\s*\Z")


def without_ends(text: str) -> str:
    """The text without tokens behind it that end the turn."""
    return _ENDS.sub("", text)
