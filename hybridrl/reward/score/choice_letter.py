r"""Multiple choice with the letters A to D: 1 if the letter that a response ends with is right, else 0.

A response states its choice as `Answer: B`, `the correct option is (B)`, `\boxed{B}`, `B is correct`, or by a last line
that is a letter. The last statement counts. One that names two letters (`A or B`) is no answer.
"""

import re
from typing import Any

from hybridrl.errors import RewardError

LETTERS = "ABCD"
_TAIL = 2000  # characters at the end of a response in which its choice is searched
_THOUGHT_END = "</think>"

#: what stands around letters without a meaning: emphasis, quotes, mathematics
_MARKS = re.compile(r"[*`$\"\u201c\u201d]|\\[()\[\]!,;]|(?<!\w)_+|_+(?!\w)")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_TEXT = re.compile(r"\\(?:text|textbf|mathbf|mathrm|mbox|bf|rm)\s*\{([^{}]*)\}")
#: a letter by itself; A before a word is an article, unless the word goes on with the sentence
_LETTER = (
    r"[(\[{]?\s*(?P<letter>[A-D])(?![A-Za-z0-9'\u2019+^=_-])(?!\s*[/&]\s*[^A-D\s])"
    r"(?!(?<=A)\s+(?!because|since|as\b|which|for\b|and\b|or\b|is\b|with\b|but\b|due\b)[a-z])"
)
_ADJECTIVE = r"(?:(?:correct|right|best|final|most likely|most accurate)\s+)?"
_NOUN = r"(?:answer|choice|option)"
_IS = (
    r"(?:\s+(?:is|would be|should be|must be|has to be)\b(?:\s+(?:therefore|thus|clearly|most likely))?\s*:?"
    r"|\s*[:=\uff1a])"
)
_STATEMENTS = (
    re.compile(rf"\b(?i:{_NOUN}{_IS}\s*(?:the\s+)?{_ADJECTIVE}(?:{_NOUN}\s*:?\s*|letter\s+)?){_LETTER}"),
    re.compile(rf"\b(?i:choose|select|pick|go with)\s+(?i:(?:the\s+)?(?:{_NOUN}\s+)?){_LETTER}"),
    re.compile(
        r"(?<![\w'])\(?(?P<letter>[A-D])\)?\s+(?i:is|must be)\s+(?i:(?:therefore|thus|clearly)\s+)?"
        rf"(?i:(?:the\s+)?(?:correct|right|best)(?:\s+{_NOUN})?\b)"
    ),
)
_ALONE = re.compile(r"\s*(?i:(?:option|choice)\s+)?[(\[{]?\s*(?P<letter>[A-D])\s*[)\]}]?\s*[.!]?\s*")
_LISTED = re.compile(r"\s*\(?(?P<letter>[A-D])\s*[).:]\s+\S.*")
_JOINED = r"(?:,|/|&|;|\bor\b|\band\b|\bas well as\b)"
#: words behind a letter that begin another sentence: `B, and A is wrong`
_SAYS = r"(?:is|was|are|would|does|has|can|cannot|fails|seems)"
_SECOND = re.compile(
    rf"\s*[)\]}}.]*\s*{_JOINED}\s*(?:(?:or|and|also|possibly|maybe|even)\s+)*(?i:{_NOUN}\s*:?\s*)?[(\[{{]?\s*"
    rf"(?P<letter>[A-D])(?![A-Za-z0-9'\u2019])(?!\s*\)?\s+{_SAYS}\b)"
)
_FIRST = re.compile(rf"(?<![\w'])(?P<letter>[A-D])\s*[)\]}}]?\s*{_JOINED}\s*(?i:(?:the\s+)?{_ADJECTIVE})$")


def letter_of(solution_str: str) -> str | None:
    """Return the letter that a response states last; None if it states none, or two at once."""
    text = solution_str.rpartition(_THOUGHT_END)[2].rstrip()[-_TAIL:]
    text = _BOXED.sub(lambda match: f" answer: {match[1]} ", _TEXT.sub(r"\1", text))
    text = _MARKS.sub("", text).rstrip()
    matches = [match for pattern in _STATEMENTS for match in pattern.finditer(text)]
    last = max(matches, key=lambda match: match.start("letter"), default=None)
    start = text.rfind("\n") + 1
    if last is None or last.end() <= start:
        letter = _letter_of_line(text[:start], text[start:])
        if letter is not None:
            return letter
    if last is None:
        return None
    others = (_SECOND.match(text, last.end()), _FIRST.search(text[: last.start()]))
    stated = {last["letter"], *(other["letter"] for other in others if other is not None)}
    return last["letter"] if len(stated) == 1 else None


def _letter_of_line(before: str, line: str) -> str | None:
    """Return the letter of a last line that is a letter, or a choice with its letter that ends no list of choices."""
    if (match := _ALONE.fullmatch(line)) is not None:
        return match["letter"]
    match = _LISTED.fullmatch(line)
    above = (before.strip().splitlines() or [""])[-1]
    return match["letter"] if match is not None and _LISTED.fullmatch(above) is None else None


def check_reference(text: str) -> None:
    """Refuse a reference that is no letter.

    Raises:
        RewardError: says what to write.
    """
    if text not in list(LETTERS):
        raise RewardError(f"the ground truth is {text[:40]!r}; it must be one of the letters {', '.join(LETTERS)}")


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score one response: `{"score": 1.0 | 0.0, "acc": bool, "pred": str}`; pred is `[INVALID]` without an answer."""
    letter = letter_of(solution_str)
    right = letter is not None and letter == str(ground_truth)
    return {"score": float(right), "acc": right, "pred": "[INVALID]" if letter is None else letter}
