r"""The MATH family: the answer is in the last `\boxed{}`."""

from typing import Any

from hybridrl.reward.score.answers import last_boxed, same_answer


def compute_score(solution_str: str, ground_truth: Any) -> float:
    r"""1 if the last `\boxed{}` of the response equals the ground truth mathematically, else 0."""
    answer = last_boxed(solution_str)
    reference = last_boxed(str(ground_truth)) or str(ground_truth)
    return float(answer is not None and same_answer(answer, reference))
