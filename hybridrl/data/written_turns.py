"""Texts of messages that hold several turns themselves: transcripts, and what a chat template has rendered already.

The chat template would write such a text as one turn, with the marks of other turns in it.
"""

from __future__ import annotations

import re

_TURN = r"(?:^|\n)[ \t]*(?:#+ ?|\*\*)?{}(?:\*\*)? ?:(?:\*\*)?"
_ASKED, _ANSWERED = r"(?:human|user|question from user)", r"(?:assistant|ai|bot|chatbot|gpt|model)"
_TRANSCRIPT = re.compile(
    r"\s*(?:#+ ?|\*\*)?" + _ASKED + r"(?:\*\*)? ?:.*?" + _TURN.format(_ANSWERED), re.IGNORECASE | re.DOTALL
)
#: marks of turns that chat templates write, and what they are called
_MARKS = (
    ("ChatML", re.compile(r"<\|im_start\|>\s*\w+")),
    ("Llama 3", re.compile(r"<\|start_header_id\|>\s*\w+\s*<\|end_header_id\|>")),
    ("Llama 4", re.compile(r"<\|header_start\|>\s*\w+\s*<\|header_end\|>")),
    ("Llama 2 or Mistral", re.compile(r"\[INST\].*\[/INST\]|\[INST\]\s*<<SYS>>", re.DOTALL)),
    ("Gemma", re.compile(r"<start_of_turn>\s*(?:user|model)")),
    ("Harmony", re.compile(r"<\|start\|>\w+(?:<\|\w+\|>\w+)?<\|message\|>")),
    ("Phi or Zephyr", re.compile(r"<\|(?:user|assistant|system)\|>")),
    ("DeepSeek", re.compile("<[|\uff5c](?:User|Assistant)[|\uff5c]>")),
    ("Alpaca", re.compile(r"(?:^|\n)### Instruction:.*\n### Response:", re.DOTALL)),
)


def written_form(text: str) -> str | None:
    """Return what a text with turns of its own is: the name of a format; None for any other text.

    A transcript begins with a turn of the user and has one of the assistant (`Human: ... Assistant:`), each at the
    beginning of a line.
    """
    if "<" in text or "[INST]" in text or "### " in text:
        for name, mark in _MARKS:
            if mark.search(text):
                return name
    return "Human: ... Assistant: ..." if ":" in text and _TRANSCRIPT.match(text) else None
