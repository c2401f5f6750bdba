"""Suites of multiple choice: GPQA."""

from __future__ import annotations

import hashlib
import random
from typing import Any

from hybridrl.data.preprocess.preprocessing import text_of
from hybridrl.data.suites.suite_rows import SuiteRow, register_suite
from hybridrl.reward.score.choice_letter import LETTERS

_INSTRUCTION = 'Think step by step. End with a line of the form "Answer: X", where X is the letter of the right choice.'


@register_suite(
    "gpqa",
    hub="Idavidrein/gpqa@gpqa_diamond:train",
    files=("gpqa_diamond.csv",),
    columns=("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
    sampling="n=4, temperature=0.6, top_p=0.95",
    licence="CC BY 4.0, access on request; Idavidrein/gpqa, 198 problems of the diamond set (arXiv 2311.12022)",
)
def gpqa(row: dict[str, Any], where: str) -> SuiteRow:
    """A question with four choices, in an order that depends on the question alone."""
    question = text_of(row, "Question", where).strip()
    right = text_of(row, "Correct Answer", where).strip()
    choices = [right, *(text_of(row, f"Incorrect Answer {number}", where).strip() for number in (1, 2, 3))]
    order = list(range(len(choices)))
    seed = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big")
    random.Random(seed).shuffle(order)
    listed = "\n".join(f"{letter}) {choices[number]}" for letter, number in zip(LETTERS, order, strict=True))
    name = str(row.get("Record ID") or "")
    return SuiteRow(f"{question}\n\n{listed}\n\n{_INSTRUCTION}", LETTERS[order.index(0)], name)
