r"""Any mathematical answer in a `\boxed{}`, compared by the math-verify package."""

from typing import Any

from hybridrl.reward.score.answers import last_boxed, same_answer


def compute_score(model_output: str, ground_truth: Any, timeout_score: float = 0.0) -> float:
    r"""1 if the last `\boxed{}` of the output equals the ground truth, else 0; `timeout_score` without a boxed
    answer."""
    answer = last_boxed(model_output)
    if answer is None:
        return timeout_score
    return float(same_answer(answer, last_boxed(str(ground_truth)) or str(ground_truth)))
