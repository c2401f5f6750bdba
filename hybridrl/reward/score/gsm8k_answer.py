"""GSM8K as a benchmark: scored as `gsm8k` scores it, with the answer, so that majorities can be counted."""

from typing import Any

from hybridrl.reward.score import gsm8k

#: refuses a reference that no answer equals
check_reference = gsm8k.check_reference


def compute_score(solution_str: str, ground_truth: Any, method: str = "strict") -> dict[str, Any]:
    """Score one response: `{"score": 1.0 | 0.0, "acc": bool, "pred": str}`; pred is `[INVALID]` without an answer.

    Args:
        solution_str: the response.
        ground_truth: the reference.
        method: see `gsm8k.extract_solution`.
    """
    answer = gsm8k.extract_solution(solution_str, method)
    right = gsm8k.compute_score(solution_str, ground_truth, method) == 1.0
    return {"score": float(right), "acc": right, "pred": "[INVALID]" if answer is None else answer}
