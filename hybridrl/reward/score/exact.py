"""Exact match of the text after `####`: the sorting task."""

from typing import Any

MARK = "####"


def extract_solution(solution_str: str) -> str | None:
    """The text after the last `####`, stripped; None where there is no mark."""
    _, mark, answer = solution_str.rpartition(MARK)
    return answer.strip() if mark else None


def compute_score(solution_str: str, ground_truth: Any, score: float = 1.0) -> float:
    """`score` if the answer equals the ground truth exactly, else 0."""
    return score if extract_solution(solution_str) == str(ground_truth).strip() else 0.0
