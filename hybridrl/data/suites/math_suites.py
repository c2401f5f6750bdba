"""Suites of mathematics: GSM8K, MATH-500, AIME 2024 and 2025."""

from __future__ import annotations

import re
from typing import Any

from hybridrl.data.preprocess import gsm8k as gsm8k_data
from hybridrl.data.preprocess import math as math_data
from hybridrl.data.preprocess.preprocessing import text_of
from hybridrl.data.suites.suite_rows import SuiteRow, register_suite
from hybridrl.errors import DataError

_LARGEST = 999  # answers of AIME are whole numbers from 0


@register_suite(
    "gsm8k",
    hub="openai/gsm8k@main:test",
    files=("main/test-*.parquet", "test.jsonl"),
    columns=("question", "answer"),
    sampling="n=1, greedy (do_sample=False)",
    licence="MIT; openai/gsm8k, 1319 problems (arXiv 2110.14168)",
)
def gsm8k(row: dict[str, Any], where: str) -> SuiteRow:
    """A word problem; the answer is the number after `####`."""
    problem = gsm8k_data.make_row(row, "test", 0, where)
    return SuiteRow(problem["prompt"], problem["reward_model"]["ground_truth"])


@register_suite(
    "math500",
    hub="HuggingFaceH4/MATH-500:test",
    files=("test.jsonl",),
    columns=("problem", "answer"),
    sampling="n=4, temperature=0.6, top_p=0.95",
    licence="MIT; HuggingFaceH4/MATH-500, 500 problems of MATH (arXiv 2103.03874, 2305.20050)",
)
def math500(row: dict[str, Any], where: str) -> SuiteRow:
    r"""A competition problem; the answer is in `\boxed{}`."""
    return SuiteRow(_boxed_prompt(row, where), text_of(row, "answer", where), str(row.get("unique_id") or ""))


@register_suite(
    "aime24",
    hub="HuggingFaceH4/aime_2024:train",
    files=("aime_2024*.parquet", "aime_2024*.jsonl"),
    columns=("problem|Problem|question", "answer|Answer"),
    sampling="n=32, temperature=0.6, top_p=0.95",
    licence="problems of the Mathematical Association of America; HuggingFaceH4/aime_2024, 30 problems",
)
def aime24(row: dict[str, Any], where: str) -> SuiteRow:
    r"""A problem of AIME 2024; the answer is a whole number in `\boxed{}`."""
    return _aime(row, where)


@register_suite(
    "aime25",
    hub="math-ai/aime25:test",
    files=("aime25*.jsonl", "aime2025*.jsonl"),
    columns=("problem|Problem|question", "answer|Answer"),
    sampling="n=32, temperature=0.6, top_p=0.95",
    licence="problems of the Mathematical Association of America; math-ai/aime25, 30 problems",
)
def aime25(row: dict[str, Any], where: str) -> SuiteRow:
    r"""A problem of AIME 2025; the answer is a whole number in `\boxed{}`."""
    return _aime(row, where)


def _aime(row: dict[str, Any], where: str) -> SuiteRow:
    answer = str(row["answer"]).strip()
    if not re.fullmatch(r"\d{1,3}", answer):
        raise DataError(f"{where}: column 'answer' must be a whole number from 0 to {_LARGEST}, found {answer!r}.")
    name = next((str(row[column]) for column in ("id", "ID") if row.get(column) is not None), "")
    return SuiteRow(_boxed_prompt(row, where), str(int(answer)), name)


def _boxed_prompt(row: dict[str, Any], where: str) -> str:
    return f"{text_of(row, 'problem', where)} {math_data.INSTRUCTION}"
