"""Questions with short answers, as of Search-R1: the last `<answer>` equals one of the reference answers."""

import json
import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.reward.score.writing import signs

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_TARGET = "target"


def normalised(text: str) -> str:
    """Text as SQuAD's exact match compares it: lower case, without punctuation, articles and further spaces."""
    text = signs(unicodedata.normalize("NFKC", text)).lower()
    text = "".join(char for char in text if char not in string.punctuation and unicodedata.category(char)[0] != "P")
    return " ".join(_ARTICLES.sub(" ", text).split())


def references(ground_truth: Any) -> list[str]:
    """The reference answers: of `{"target": answers}`, of that as JSON, of a list, or of one text.

    Raises:
        RewardError: there are none.
    """
    value = ground_truth
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            value = ground_truth
    if isinstance(value, Mapping):
        value = value.get(_TARGET)
    if isinstance(value, str):
        value = [value]
    texts = value.tolist() if hasattr(value, "tolist") else value
    if (
        not isinstance(texts, Sequence)
        or not texts
        or not all(isinstance(text, str) and normalised(text) for text in texts)
    ):
        raise RewardError(
            f"the ground truth is {str(ground_truth)[:60]!r}; it must be text, a list of texts, or "
            f'{{"{_TARGET}": [texts]}}'
        )
    return list(texts)


def check_ground_truth(ground_truth: Any) -> None:
    """Refuse a ground truth without answers.

    Raises:
        RewardError: see `references`.
    """
    references(ground_truth)


def compute_score(solution_str: str, ground_truth: Any, format_score: float = 0.0) -> float:
    """1 if the last `<answer>` is a reference answer, `format_score` for another one, 0 without any."""
    answers = _ANSWER.findall(solution_str)
    if not answers:
        return 0.0
    accepted = {normalised(reference) for reference in references(ground_truth)}
    return 1.0 if normalised(answers[-1]) in accepted else format_score
