r"""Geometry problems: reasoning in `<think>`, the answer in `\boxed{}`."""

import re
from typing import Any

from hybridrl.reward.score.answers import last_boxed, same_answer

_FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def format_reward(predict_str: str) -> float:
    """1 if the whole response is reasoning followed by a boxed answer, else 0."""
    return float(_FORMAT.fullmatch(predict_str.strip()) is not None)


def acc_reward(predict_str: str, ground_truth: Any, use_boxed: bool = True) -> float:
    """1 if the answer (boxed, or the whole text) equals the ground truth, else 0."""
    answer = last_boxed(predict_str) if use_boxed else predict_str
    return float(answer is not None and same_answer(answer, str(ground_truth)))


def compute_score(predict_str: str, ground_truth: Any, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """`(1 - format_score) * accuracy + format_score * format`."""
    accuracy = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * accuracy + format_score * format_reward(predict_str)
