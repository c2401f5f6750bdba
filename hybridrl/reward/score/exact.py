"""Exact match of the text after `####`: the sorting task."""

from typing import Any

from hybridrl.errors import RewardError

MARK = "####"


def extract_solution(solution_str: str) -> str | None:
    """The text after the last `####`, stripped; None where there is no mark."""
    _, mark, answer = solution_str.rpartition(MARK)
    return answer.strip() if mark else None


def check_reference(text: str) -> None:
    """Refuse a reference with the mark in it, which no answer equals.

    Raises:
        RewardError: says what to write.
    """
    if MARK in text:
        raise RewardError(
            f"the ground truth is {text[-60:]!r}, with which no answer could be right; write {extract_solution(text)!r}"
        )


def compute_score(solution_str: str, ground_truth: Any, score: float = 1.0) -> float:
    """`score` if the answer equals the ground truth exactly, else 0."""
    return score if extract_solution(solution_str) == str(ground_truth).strip() else 0.0
