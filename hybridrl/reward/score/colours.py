"""Scorer of the colour task (`hybridrl.data.preprocess.colours`)."""

from typing import Any

from hybridrl.reward.score import reference_text

LETTERS = "rgby"


def compute_score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float]:
    """1 if the response begins with the ground truth, 0.1 if with the letter of another colour, else 0.

    Returns:
        `score`, and `acc`, which is 1 for the right letter only.
    """
    first = solution_str.strip()[:1]
    acc = float(first == reference_text(ground_truth))
    return {"score": acc if acc or first not in LETTERS or not first else 0.1, "acc": acc}
