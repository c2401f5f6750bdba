"""Suites of instructions that a program can check: IFEval."""

from __future__ import annotations

import json
from typing import Any

from hybridrl.data.preprocess.preprocessing import text_of
from hybridrl.data.suites.suite_rows import SuiteRow, register_suite
from hybridrl.errors import DataError


@register_suite(
    "ifeval",
    hub="google/IFEval:train",
    files=("ifeval_input_data.jsonl", "input_data.jsonl"),
    columns=("prompt", "instruction_id_list", "kwargs"),
    sampling="n=1, greedy (do_sample=False)",
    licence="Apache 2.0; google/IFEval, 541 prompts (arXiv 2311.07911)",
)
def ifeval(row: dict[str, Any], where: str) -> SuiteRow:
    """A prompt with instructions."""
    names, arguments = row["instruction_id_list"], row["kwargs"]
    if not isinstance(names, list) or not isinstance(arguments, list) or len(names) != len(arguments):
        raise DataError(f"{where}: columns 'instruction_id_list' and 'kwargs' must be lists of one length.")
    truth = {
        "ids": names,
        "kwargs": [{key: value for key, value in (each or {}).items() if value is not None} for each in arguments],
    }
    return SuiteRow(text_of(row, "prompt", where), json.dumps(truth), str(row.get("key") or ""))
