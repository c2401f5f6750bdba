r"""The NuminaMath sources: the last `\boxed{}`, or else the end of the text, compared mathematically."""

import re
from typing import Any

from hybridrl.reward.score.answers import last_boxed, same_answer

_PHRASE = re.compile(r"(?i)(?:final answer|answer)\s*(?:is|:)\s*:?\s*([^\n]+)")


def compute_score(model_output: str, ground_truth: Any) -> dict[str, Any]:
    """Score one response: `{"score": 1.0 | 0.0, "acc": bool, "pred": str}`."""
    answer = last_boxed(model_output)
    if answer is None:
        phrases = _PHRASE.findall(model_output[-300:])
        answer = phrases[-1].strip().rstrip(".").strip("$").strip() if phrases else None
    reference = last_boxed(str(ground_truth)) or str(ground_truth)
    correct = answer is not None and same_answer(answer, reference)
    return {"score": float(correct), "acc": correct, "pred": "[INVALID]" if answer is None else answer}
