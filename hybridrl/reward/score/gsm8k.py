"""Grade-school mathematics (GSM8K): the answer is a number."""

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.reward.score.writing import SCALES, powers, signs

_TAIL = 300  # the answer is searched in so many characters at the end of a response: long texts are slow to search
_SIGN = r"(?:(?<![\w)])[-+]\s?)?"
_NUMBER = rf"{_SIGN}\\?\$?\s?{_SIGN}(?:[0-9][0-9.,]*|\.[0-9]+)(?:\s?/\s?[0-9]+|[^\S\n]+[0-9]+\s?/\s?[0-9]+(?![0-9]))?"
#: what a number is multiplied by
_FACTOR = (
    rf"(?:[eE]([-+]?[0-9]{{1,3}})(?!\w)|\s?(?:\\times|\*|x)\s*10\s*\^\s*\{{?(-?[0-9]{{1,3}})|\s({'|'.join(SCALES)})\b)"
)
#: what makes another answer of a number: a power, a further operation, a second number
_MORE = (
    r"(?:\s?(?:\^|!(?!\w)|[*×/](?=\s?[0-9])|\\(?:times|cdot|frac|sqrt)|:(?=[0-9]))"
    r"|\s?\+\s?(?=[0-9])|\s?[-\u2013](?=[0-9])|\s(?:or|to)\s+[-+]?\\?\$?[-+]?(?=[0-9])|[kKMBxyzn](?![A-Za-z]))"
)
_BEFORE = (
    r"(?i:[\s*:]|\\[(\[]|\\(?:boxed|text|textbf|mathbf|mathrm)\s*\{|\$(?=\\)|[a-z]\s?=|(?:the\s+)?(?:final\s+)?answer"
    r"(?:\s*is\b)?)*"
)
_MARKED = re.compile(rf"####{_BEFORE}({_NUMBER})(?:{_FACTOR})?({_MORE}[^\n]*)?")
_ANY = re.compile(rf"({_NUMBER})(?:{_FACTOR})?")
#: spaces between thousands that no word is separated by
_THIN = re.compile(r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?:\.[0-9]*)?")
_MIXED = re.compile(r"([-+]?)([0-9]+)\s+([0-9]+)\s?/\s?([0-9]+)")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The final answer of a response.

    Args:
        solution_str: the response.
        method: `strict`: the last number that follows `####`. `flexible`: the last number of the text.

    Returns:
        The number as written, without `$`, thousands separators, a plus and punctuation behind it, and multiplied by a
        power of ten or a word such as million behind it. A text of more than one number stays as it is. None if there
        is no number.

    Raises:
        RewardError: another method.
    """
    if method not in ("strict", "flexible"):
        raise RewardError(f"gsm8k: method={method!r}; allowed are 'strict' and 'flexible'.")
    numbers = (_MARKED if method == "strict" else _ANY).findall(_signs(solution_str.rstrip()[-_TAIL:]))
    return _answer(*numbers[-1]) if numbers else None


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right number, `format_score` for another one, 0 where no number is found.

    Numbers are compared by value: `18`, `+18`, `18.0`, `36/2` and `$18.` are one answer.
    """
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if _value(answer) == _value(_reference(str(ground_truth))) else format_score


def check_reference(text: str) -> None:
    """Refuse a reference that not even itself equals, such as a whole solution or a number with a unit.

    Raises:
        RewardError: says what to write.
    """
    if compute_score(f"#### {text}", text) == 1.0:
        return
    is_one = len(_ANY.findall(_signs(text))) == 1
    number = extract_solution(text) or (extract_solution(text, "flexible") if is_one else None)
    advice = f"; write {number!r}" if number is not None else ""
    excerpt = text if len(text) <= 60 else f"...{text[-60:]}"
    raise RewardError(
        f"the ground truth is {excerpt!r}, with which no answer could be right: it must be a number{advice}"
    )


def _signs(text: str) -> str:
    """`signs`, with powers of numbers; the 2 in m² is no power of a number."""
    return signs(powers(_THIN.sub("", text), r"(?<=[0-9])"))


def _reference(text: str) -> str:
    match = _ANY.fullmatch(_signs(text.strip()))
    return _plain(signs(text)) if match is None else _answer(*match.groups(""))


def _answer(number: str, exponent: str, power: str, scale: str, more: str = "") -> str:
    """The number of a match, as text."""
    if more:
        return number + more
    text = _plain(number)
    if not (exponent or power or scale):
        return text
    value = _value(text)
    if isinstance(value, str):
        return number
    factor = Fraction(10) ** int(exponent or power) if exponent or power else SCALES[scale]
    return str(value * factor)


def _plain(number: str) -> str:
    mixed = _MIXED.fullmatch(re.sub(r"[$\\]", "", number).strip())
    if mixed is not None:
        sign, whole, top, bottom = mixed.groups()
        return f"{sign.removeprefix('+')}{int(whole) * int(bottom) + int(top)}/{bottom}"
    text = re.sub(r"[\s$\\]", "", number).rstrip(".,").removeprefix("+")
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text


def _value(number: str) -> Fraction | str:
    top, _, bottom = number.partition("/")
    try:
        return Fraction(Decimal(top)) / Fraction(Decimal(bottom or "1"))
    except (InvalidOperation, ValueError, ZeroDivisionError, OverflowError):
        return number  # such as 1.2.3: compared as text
