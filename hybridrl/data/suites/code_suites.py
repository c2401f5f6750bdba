"""Suites of programs: HumanEval and LiveCodeBench."""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from typing import Any

from hybridrl.data.preprocess.preprocessing import text_of
from hybridrl.data.suites.suite_rows import SuiteRow, register_suite
from hybridrl.errors import DataError

_LARGEST = 2**30  # bytes of unpacked test cases
#: the opcodes of a pickle that holds one text and nothing else
_TEXT_OPCODES = frozenset(
    (
        *("PROTO", "FRAME", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"),
    )
)
_STDIN, _FUNCTIONAL = "stdin", "functional"


@register_suite(
    "humaneval",
    hub="openai/openai_humaneval:test",
    files=("HumanEval.jsonl.gz", "HumanEval.jsonl", "openai_humaneval/test-*.parquet"),
    columns=("task_id", "prompt", "test", "entry_point"),
    sampling="n=1, greedy (do_sample=False), or n=20, temperature=0.8, top_p=0.95",
    licence="MIT; openai/openai_humaneval, 164 problems (arXiv 2107.03374)",
)
def humaneval(row: dict[str, Any], where: str) -> SuiteRow:
    """A function to complete, with a program that checks it."""
    prompt, test, name = (text_of(row, column, where) for column in ("prompt", "test", "entry_point"))
    if "def check(" not in test:
        raise DataError(f"{where}: column 'test' defines no function 'check': {test[:60]!r}.")
    question = (
        f"Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{prompt}```"
    )
    truth = {"prompt": prompt, "test": test, "entry_point": name}
    return SuiteRow(question, json.dumps(truth), text_of(row, "task_id", where))


@register_suite(
    "livecodebench",
    hub="livecodebench/code_generation_lite:test",
    files=("test*.jsonl",),
    columns=("question_content", "question_id", "starter_code", "public_test_cases", "private_test_cases", "metadata"),
    sampling="n=10, temperature=0.2, top_p=0.95",
    licence="problems of LeetCode, AtCoder and Codeforces; livecodebench/code_generation_lite (arXiv 2403.07974)",
)
def livecodebench(row: dict[str, Any], where: str) -> SuiteRow:
    """A problem of a contest, with test cases of the standard input or of a function."""
    public = _json(row["public_test_cases"], "public_test_cases", where)
    private = cases_of(row["private_test_cases"], where)
    cases = [*public, *private]
    if not cases or not all(isinstance(case, dict) and {"input", "output"} <= case.keys() for case in cases):
        raise DataError(f"{where}: there must be test cases, each an object with 'input' and 'output'.")
    kinds = {str(case.get("testtype")) for case in cases}
    if len(kinds) != 1 or not kinds <= {_STDIN, _FUNCTIONAL}:
        raise DataError(
            f"{where}: the test cases are of the kinds {', '.join(sorted(kinds))}; all must be {_STDIN}, or all "
            f"{_FUNCTIONAL}."
        )
    truth: dict[str, Any] = {name: [str(case[name[:-1]]) for case in cases] for name in ("inputs", "outputs")}
    question = text_of(row, "question_content", where)
    if kinds == {_FUNCTIONAL}:
        metadata = _json(row["metadata"], "metadata", where)
        if not isinstance(metadata, dict) or not metadata.get("func_name"):
            raise DataError(f"{where}: column 'metadata' has no 'func_name', which functional test cases call.")
        truth["fn_name"] = metadata["func_name"]
        task = "Complete this code, and answer with the whole of it in one code block:"
        form = f"{task}\n\n```python\n{row['starter_code']}\n```"
    else:
        form = "Write a Python program that reads the standard input and prints the answer. Put it in one code block."
    return SuiteRow(f"{question}\n\n{form}", json.dumps(truth), str(row["question_id"]))


def cases_of(value: Any, where: str) -> list[Any]:
    """Return private test cases: JSON, or Base64 of compressed data with a pickle of a text that is JSON.

    Nothing is unpickled: the text is read from the only opcodes that such a pickle has.

    Raises:
        DataError: it is something else, or more than 1 GiB.
    """
    text = str(value or "[]")
    if not text.lstrip().startswith("["):
        try:
            unpacking = zlib.decompressobj()
            content = unpacking.decompress(base64.b64decode(text, validate=True), _LARGEST)
            if unpacking.unconsumed_tail or not unpacking.eof:
                raise ValueError(f"unpacked it is incomplete, or has more than {_LARGEST} bytes")
            text = _pickled_text(content)
        except (binascii.Error, zlib.error, ValueError, IndexError) as error:
            raise DataError(
                f"{where}: column 'private_test_cases' cannot be read ({error}). It must be a list as JSON, or that as "
                "text, pickled, compressed and in Base64, as it is published."
            ) from None
    cases = _json(text, "private_test_cases", where)
    if not isinstance(cases, list):
        raise DataError(f"{where}: column 'private_test_cases' must hold a list, found {type(cases).__name__}.")
    return cases


def _pickled_text(content: bytes) -> str:
    """Return the text that a pickle holds, without running it.

    Raises:
        ValueError: it holds anything else.
    """
    texts = []
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name not in _TEXT_OPCODES:
            raise ValueError(f"the pickle has the opcode {opcode.name}, and one that holds a text has none of these")
        if isinstance(argument, str) and "UNICODE" in opcode.name:
            texts.append(argument)
    if len(texts) != 1:
        raise ValueError(f"the pickle holds {len(texts)} texts, and must hold one")
    return texts[0]


def _json(value: Any, column: str, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: column {column!r} is no JSON ({error}).") from None
