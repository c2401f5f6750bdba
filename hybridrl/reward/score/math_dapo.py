r"""Competition mathematics as DAPO scores it: `Answer: ...` or a `\boxed{}` at the end, 1 or -1 points."""

import re
from typing import Any

from hybridrl.reward.score.answers import last_boxed, same_answer

_TAIL = 300  # the answer is searched in so many characters at the end of a response
_BOXED_TAIL = 100  # the same with strict_box_verify
_ANSWER = re.compile(r"(?i)answer\s*[:\uff1a]\s*((?:(?!answer\s*[:\uff1a])[^\n])+)")


def compute_score(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    r"""Score one response.

    Args:
        solution_str: the response.
        ground_truth: the reference answer.
        strict_box_verify: only a `\boxed{}` counts, and it must equal the reference exactly; otherwise the
            text after the last `Answer:` counts, or a `\boxed{}` in it, compared mathematically; without `Answer:` the
            last `\boxed{}`.
        pause_tokens_index: four positions of pause tokens; with `strict_box_verify` the search starts 100
            characters before the last one.

    Returns:
        `{"score": 1.0 | -1.0, "acc": bool, "pred": str}`; pred is `[INVALID]` where no answer is found.
    """
    reference = str(ground_truth)
    if strict_box_verify:
        start = pause_tokens_index[-1] - _BOXED_TAIL if pause_tokens_index else -_BOXED_TAIL
        answer = last_boxed(solution_str[start:])
        correct = answer is not None and answer == reference
    else:
        answer = _answer_line(solution_str.rstrip()[-_TAIL:])
        correct = answer is not None and same_answer(answer, reference)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": "[INVALID]" if answer is None else answer}


def _answer_line(text: str) -> str | None:
    lines = _ANSWER.findall(text)
    if not lines:
        return last_boxed(text)
    line = lines[-1].strip()
    boxed = last_boxed(line)
    return boxed if boxed is not None else line.strip("*`").strip().strip("$").strip()
