"""Tries a reward function on the answers that the data have, and on wrong ones."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hybridrl.check.findings import Findings
from hybridrl.config.schema.choices import SCORES
from hybridrl.reward import RewardManager
from hybridrl.reward.response_rows import ResponseRow
from hybridrl.reward.signature import ground_truth_of

#: forms in which reward functions look for an answer
FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>", "Answer: {}")
WRONG = "none of this"
_BESIDES = ("input_ids", "multi_modal_inputs", "position_ids")


def describe_answers(findings: Findings, manager: RewardManager, tokenizer: Any, dataset: Any, rows: int) -> set[str]:
    """Score the answers of some rows, and a wrong answer to each, and warn where the scores do not differ.

    Each answer is scored in all `FORMS`, and as `extra_info.answer` has it, and the highest score counts. The wrong
    answer is the one of another row, or `WRONG`, in the same forms.

    Returns:
        Names of the columns that the scored answers would have in a batch; none if no answer has a score.

    Raises:
        RewardError: the function fails.
    """
    items = [dataset[number] for number in range(min(rows, len(dataset)))]
    truths = [ground_truth_of(item) for item in items]
    texts = [_answer(truth) for truth in truths]
    if not any(text is not None for text in texts):
        _, columns = _score(manager, tokenizer, [(items[0], WRONG)])
        findings.facts["reward"] = {"rows": []}
        findings.say("reward", "rows have no answer in text or numbers, so that the function was only called once")
        return columns
    attempts: list[tuple[int, str, bool]] = []
    for number, text in enumerate(texts):
        if text is None:
            continue
        wrong = next((other for other in texts if other is not None and other.strip() != text.strip()), WRONG)
        for is_right, value in ((True, text), (False, wrong)):
            attempts += [(number, form.format(value), is_right) for form in FORMS]
        solution = _solution(items[number])
        attempts += [(number, solution, True)] if solution else []
    scores, columns = _score(manager, tokenizer, [(items[number], text) for number, text, _ in attempts])
    results: list[dict[str, Any]] = []
    for number in dict.fromkeys(number for number, _, _ in attempts):
        best: dict[bool, tuple[float | None, str]] = {}
        for (row, text, is_right), score in zip(attempts, scores, strict=True):
            if row == number and (is_right not in best or _rank(score) > _rank(best[is_right][0])):
                best[is_right] = score, text
        (right, written), (wrong_score, wrong_text) = best[True], best[False]
        results.append(
            {"row": number, "answer": written, "score": right, "wrong": wrong_text, "wrong_score": wrong_score}
        )
        findings.say(
            "reward",
            f"row {number}: {_short(written)} scores {_shown(right)}, {_short(wrong_text)} {_shown(wrong_score)}",
        )
    findings.facts["reward"] = {"rows": results}
    if not any(_rank(result["score"]) > _rank(result["wrong_score"]) for result in results):
        findings.warnings.append(
            f"the reward function ({manager.pool.label}) scores answers of the data no higher than wrong ones, in any "
            f"of the forms {', '.join(FORMS)}: if it expects another form, nothing is wrong; otherwise no response is "
            "ever right"
        )
    return columns


def check_metric(findings: Findings, metric: str, columns: Collection[str]) -> None:
    """Warn where `algorithm.filter_groups.metric` is no score, and no column of scored answers."""
    if metric not in SCORES and metric not in columns:
        findings.warnings.append(
            f"algorithm.filter_groups.metric={metric}: answers of the data have {', '.join(sorted(columns))} from the "
            f"reward function. Unless the rollout gives a column {metric!r}, the first batch ends the run; use score, "
            "or a key that the function returns for every sample"
        )


def _score(
    manager: RewardManager, tokenizer: Any, attempts: Sequence[tuple[Mapping[str, Any], str]]
) -> tuple[list[float | None], set[str]]:
    rows = [
        ResponseRow(
            tokenizer.encode(text, add_special_tokens=False),
            {name: value for name, value in item.items() if name not in _BESIDES},
        )
        for item, text in attempts
    ]
    samples = manager.samples(rows)
    outcomes = manager.score_batch(samples, lambda number: f"answer {attempts[number][1]!r}")
    scores = [None if outcome.unscored is not None else outcome.score for outcome in outcomes]
    has_scores = any(score is not None for score in scores)
    return scores, set(manager.columns_of(rows, samples, outcomes)) if has_scores else set()


def _answer(truth: Any) -> str | None:
    """An answer as text; None if it is neither text nor a number."""
    if isinstance(truth, bool) or not isinstance(truth, str | int | float):
        return None
    return str(truth)


def _solution(item: Mapping[str, Any]) -> str | None:
    info = item.get("extra_info")
    answer = info.get("answer") if isinstance(info, Mapping) else None
    return answer if isinstance(answer, str) and answer else None


def _rank(score: float | None) -> float:
    return -math.inf if score is None or math.isnan(score) else score


def _shown(score: float | None) -> str:
    return "has no score" if score is None else f"{score:g}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
