"""Two reward components for GDPO: the correct answer, and the requested format."""

from typing import Any

from hybridrl.reward.score.gsm8k import extract_solution


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, float]:
    """`accuracy`: the last number is the reference's. `format`: it follows a single `####`."""
    answer = extract_solution(solution_str, method="flexible")
    accuracy = float(answer is not None and answer == str(ground_truth))
    formatted = float(solution_str.count("####") == 1 and extract_solution(solution_str) is not None)
    return {"score": accuracy + formatted, "acc": accuracy, "accuracy": accuracy, "format": formatted}
