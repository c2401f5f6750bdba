"""Grade-school mathematics (GSM8K): the answer is a number."""

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.reward.score.answers import signs

_TAIL = 300  # the answer is searched in so many characters at the end of a response: long texts are slow to search
_SIGN = r"(?:(?<![\w)])[-+]\s?)?"
_NUMBER = rf"{_SIGN}\$?\s?{_SIGN}(?:[0-9][0-9.,]*|\.[0-9]+)(?:\s?/\s?[0-9]+)?"
_MARKED = re.compile(rf"####[\s*]*({_NUMBER})")
_ANY = re.compile(_NUMBER)
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?:\.[0-9]*)?")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The final answer of a response.

    Args:
        solution_str: the response.
        method: `strict`: the last number that follows `####`. `flexible`: the last number of the text.

    Returns:
        The number as written, without `$`, thousands separators, a plus and punctuation behind it; None if there is
        none.

    Raises:
        RewardError: another method.
    """
    if method not in ("strict", "flexible"):
        raise RewardError(f"gsm8k: method={method!r}; allowed are 'strict' and 'flexible'.")
    numbers = (_MARKED if method == "strict" else _ANY).findall(signs(solution_str[-_TAIL:]))
    return _plain(numbers[-1]) if numbers else None


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right number, `format_score` for another one, 0 where no number is found.

    Numbers are compared by value: `18`, `+18`, `18.0`, `36/2` and `$18.` are one answer.
    """
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if _value(answer) == _value(_plain(signs(str(ground_truth)))) else format_score


def _plain(number: str) -> str:
    text = re.sub(r"[\s$]", "", number).rstrip(".,").removeprefix("+")
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text


def _value(number: str) -> Fraction | str:
    top, _, bottom = number.partition("/")
    try:
        return Fraction(Decimal(top)) / Fraction(Decimal(bottom or "1"))
    except (InvalidOperation, ValueError, ZeroDivisionError, OverflowError):
        return number  # such as 1.2.3: compared as text
