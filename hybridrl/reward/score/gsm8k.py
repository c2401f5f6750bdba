"""Grade-school mathematics (GSM8K): the answer is a number."""

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from hybridrl.errors import RewardError

_TAIL = 300  # the answer is searched in so many characters at the end of a response: long texts are slow to search
_NUMBER = r"-?\$?[0-9][0-9.,]*|-?\$?\.[0-9]+"
_MARKED = re.compile(rf"####\s*\$?\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The final answer of a response.

    Args:
        solution_str: the response.
        method: `strict`: the last number that follows `####`. `flexible`: the last number of the text.

    Returns:
        The number as written, without `$`, thousands separators and a trailing full stop; None if there is none.

    Raises:
        RewardError: another method.
    """
    if method not in ("strict", "flexible"):
        raise RewardError(f"gsm8k: method={method!r}; allowed are 'strict' and 'flexible'.")
    found = (_MARKED if method == "strict" else _ANY).findall(solution_str[-_TAIL:])
    return _plain(found[-1]) if found else None


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right number, `format_score` for another one, 0 where no number is found.

    Numbers are compared by value: `18`, `18.0` and `$18.` are one answer.
    """
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if _value(answer) == _value(_plain(str(ground_truth))) else format_score


def _plain(number: str) -> str:
    return number.strip().replace("$", "").replace(",", "").rstrip(".")


def _value(number: str) -> Decimal | str:
    try:
        return Decimal(number)
    except InvalidOperation:
        return number  # such as 1.2.3: compared as text
