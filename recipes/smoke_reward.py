"""A reward that varies between responses of any model, so two steps of a random model exercise every recipe."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, float]:
    """The share of characters before `m`, and of digits."""
    length = max(len(solution_str), 1)
    early = sum(char < "m" for char in solution_str) / length
    digits = sum(char.isdigit() for char in solution_str) / length
    return {"score": early, "acc": early, "accuracy": early, "format": digits}
