"""Programs as answers: run on test cases in a sandbox, and scored by how many they pass.

The ground truth is a dict, or the same as JSON: `{"inputs": [...], "outputs": [...]}` for programs that read the
standard input; with `fn_name` for functions (or methods of `class Solution`), where an input is the list of arguments;
or `{"assert_case": [...]}`, statements that the program is followed by. What is expected never enters the sandbox: the
program's output is compared here. Of asserts, the parts that call the program are evaluated in its process, and the
rest here; see `hybridrl.reward.score.asserts` for those that it evaluates as a whole.
"""

import contextlib
import functools
import json
import math
import re
import secrets
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.notify import notify
from hybridrl.reward.score.asserts import ENCODER, AssertCase, decoded, split_assert
from hybridrl.sandbox import EXPOSURE, Ended, Limits, LocalSandbox, Program, RemoteSandbox, Sandbox

_CONSIDERED = 10  # test cases that partial credit looks at
_LARGE = 2**22  # bytes that are expected where that is not known
_NO_PROGRAM = 121  # the exit code of a runner whose program cannot be compiled
_RUNNER = """
import builtins, json, os, sys, traceback, types
names = {}
exec("import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, random\\n"
     "import re, string, sys\\nfrom bisect import *\\nfrom collections import *\\nfrom functools import *\\n"
     "from heapq import *\\nfrom itertools import *\\nfrom math import *\\n"
     "from operator import *\\nfrom typing import *", names)
names = {name: value for name, value in names.items() if name not in dir(builtins) and not name.startswith("__")}
with open("solution.py", encoding="utf-8") as file:
    source = file.read()
try:
    program = compile(source, "solution.py", "exec")
except (SyntaxError, ValueError, RecursionError, MemoryError):
    traceback.print_exc(limit=0)
    os._exit(NO_PROGRAM)
sys.argv[:] = ["solution.py"]
module = types.ModuleType("__main__" if FUNCTION is None else "solution")
sys.modules[module.__name__] = module
vars(module).update(names)
digits, limit = getattr(sys, "set_int_max_str_digits", int), getattr(sys, "get_int_max_str_digits", int)()
digits(0)
arguments = None if FUNCTION is None else json.loads(sys.stdin.read())
digits(limit)
exec(program, vars(module))
result = None
if FUNCTION is not None:
    owner = getattr(module, "Solution", None)
    result = getattr(owner() if hasattr(owner, FUNCTION) else module, FUNCTION)(*arguments)
if EXPRESSION is not None:
    result = encoded(eval(EXPRESSION, vars(module)))
def plain(value):
    if hasattr(value, "tolist"):  # of numpy
        return value.tolist()
    if hasattr(value, "__iter__"):
        return list(value)
    try:
        return int(value) if value == int(value) else float(value)  # Decimal and Fraction
    except (TypeError, ValueError, OverflowError):
        return str(value)
def keyed(value):
    if isinstance(value, dict):
        return {name.tolist() if hasattr(name, "tolist") else name: keyed(item) for name, item in value.items()}
    return [keyed(item) for item in value] if isinstance(value, (list, tuple)) else value
if MARK is not None:
    digits(0)
    sys.stdout.flush()
    try:
        text = json.dumps(result, default=plain)
    except TypeError:  # a name of an object that is a number of numpy
        text = json.dumps(keyed(result), default=plain)
    data = ("\\n" + MARK + text).encode()
    while data:
        data = data[os.write(1, data):]
"""


@dataclass(frozen=True)
class Tests:
    """The test cases of a problem.

    Attributes:
        inputs: text of the standard input, or the arguments of the function as a list in JSON.
        outputs: what is expected, one per input; of asserts an `AssertCase`, or None where the program's process
            evaluates the whole statement.
        function: the name of the function; None: the program reads and prints.
        asserts: statements, one per input.
    """

    inputs: tuple[str, ...]
    outputs: tuple[Any, ...]
    function: str | None = None
    asserts: tuple[str, ...] = ()


def compute_score(
    solution_str: str,
    ground_truth: Any,
    continuous: bool = True,
    timeout: float = 10.0,
    total_timeout: float = 60.0,
    sandbox_fusion_url: str | None = None,
    memory_limit_mb: int = 1024,
    max_concurrent: int | None = None,
    concurrent_semaphore: Any = None,
    allow_unisolated: bool | None = None,
) -> dict[str, Any]:
    """Score the last program in a response; a response without a code block scores 0.

    Args:
        continuous: the score is the share of the first 10 test cases that the program passes; otherwise 1 if it passes
            all, else 0, and the first failure ends the run of further ones.
        timeout: seconds for each test case.
        total_timeout: seconds that a program may run in all; test cases that have not begun by then count as failed.
        sandbox_fusion_url: of a server; None: programs run on this machine.
        memory_limit_mb: memory of each process.
        max_concurrent: programs at once; None: one per core, and 64 with a url.
        concurrent_semaphore: is held while a program runs; None: there is none.
        allow_unisolated: run programs on this machine also where its kernel gives no namespaces; None: see
            `LocalSandbox`.

    Returns:
        `score`; `acc`, whether all test cases that count passed; `tests` and `passed`, their numbers; `fault`, what
        became of the first that failed: "wrong", "error", "time", "output", "syntax", "no program"; "" where none did.

    Raises:
        SandboxError: the sandbox failed, so there is no score.
        RewardError: the test cases are none.
    """
    tests = read_tests(ground_truth)
    count = min(len(tests.inputs), _CONSIDERED) if continuous else len(tests.inputs)
    program = program_of(solution_str)
    if program is None:
        return {"score": 0.0, "acc": False, "tests": count, "passed": 0, "fault": "no program"}
    return score_program(
        program,
        tests,
        continuous,
        timeout,
        total_timeout,
        sandbox_fusion_url,
        memory_limit_mb,
        max_concurrent,
        concurrent_semaphore,
        allow_unisolated,
    )


def score_program(
    program: str,
    tests: Tests,
    continuous: bool = True,
    timeout: float = 10.0,
    total_timeout: float = 60.0,
    sandbox_fusion_url: str | None = None,
    memory_limit_mb: int = 1024,
    max_concurrent: int | None = None,
    concurrent_semaphore: Any = None,
    allow_unisolated: bool | None = None,
) -> dict[str, Any]:
    """Run a program on test cases. Arguments, result and errors are those of `compute_score`."""
    count = min(len(tests.inputs), _CONSIDERED) if continuous else len(tests.inputs)
    sandbox = sandbox_of(sandbox_fusion_url, memory_limit_mb, max_concurrent, allow_unisolated)
    passed, used_s, first = 0, 0.0, ""
    for number in range(count):
        if used_s >= total_timeout:
            first = first or "time"
            break
        with concurrent_semaphore or contextlib.nullcontext():
            fault, seconds = _run(
                sandbox, program, tests, number, min(timeout, total_timeout - used_s), memory_limit_mb
            )
        used_s += seconds
        passed += not fault
        first = first or fault
        if fault == "syntax" or (fault and not continuous):
            break
    score = passed / count if continuous else float(passed == count)
    return {"score": score, "acc": passed == count, "tests": count, "passed": passed, "fault": first}


_PYTHON = ("python", "py", "python3")
#: what begins and ends a block of code
_FENCE = re.compile(r"`{3,}|^[ ]{0,3}~{3,}", re.MULTILINE)


def program_of(solution_str: str) -> str | None:
    """The last code block of a response (of those in Python, where there are any); None where there is none.

    A block in a list is indented as a whole, and that of no text is none.
    """
    parts = _FENCE.split(solution_str)
    numbers = range(1, len(parts) - 1, 2)  # without one that was cut off
    blocks = [(parts[number], parts[number - 1].rpartition("\n")[2]) for number in numbers]
    blocks = [(block, before) for block, before in blocks if block.strip() not in ("", *_PYTHON)]
    named = [each for each in blocks if _language(each[0]) in _PYTHON]
    for block, before in reversed(named or blocks):
        first, newline, rest = block.partition("\n")
        language = first.strip().replace("+", "")
        if not newline or not (not language or language.isalnum() or _language(block) in _PYTHON):
            return block
        return textwrap.dedent(rest) if before.isspace() else rest
    return None


def _language(block: str) -> str:
    """The language that the first line of a block names, also beside attributes: `python title="a.py"`, `{python}`."""
    return (block.partition("\n")[0].split() or [""])[0].strip("{}.").lower()


def read_tests(ground_truth: Any) -> Tests:
    """The test cases of a ground truth.

    Raises:
        RewardError: it is none.
    """
    form = '{"inputs": [...], "outputs": [...]}, with "fn_name" for functions, or {"assert_case": [...]}, also as JSON'
    try:
        truth = _read_json(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except (ValueError, RecursionError) as error:
        raise RewardError(f"the ground truth is no JSON ({error}); it must be {form}") from None
    if not isinstance(truth, Mapping):
        raise RewardError(f"the ground truth is {type(truth).__name__}; it must be {form}")
    asserts = _items(truth.get("assert_case"))
    if asserts:
        texts = tuple(map(str, asserts))
        return Tests(("",) * len(texts), tuple(map(split_assert, texts)), None, texts)
    inputs, results = _items(truth.get("inputs")), _items(truth.get("outputs"))
    if not inputs or len(inputs) != len(results):
        raise RewardError(f"the ground truth has {len(inputs)} inputs and {len(results)} outputs; it must be {form}")
    function = truth.get("fn_name")
    if function is None:
        return Tests(tuple(map(_text, inputs)), tuple(map(_text, results)))
    return Tests(tuple(map(_arguments, inputs)), tuple(map(_value, results)), str(function))


#: what checks a ground truth before a run, in place of the check for text and numbers
check_ground_truth = read_tests


def check_machine(
    sandbox_fusion_url: str | None = None,
    memory_limit_mb: int = 1024,
    max_concurrent: int | None = None,
    allow_unisolated: bool | None = None,
    **_: Any,
) -> None:
    """Run a small program, before a run needs it.

    Raises:
        RewardError: none runs.
    """
    if reason := sandbox_of(sandbox_fusion_url, memory_limit_mb, max_concurrent, allow_unisolated).check():
        notify(
            f"scoring of programs: the kernel gives no namespaces ({reason}), and programs of the model run without "
            f"isolation, as the settings allow: {EXPOSURE}; reward.sandbox_fusion.url runs them elsewhere",
            "warning",
        )


@functools.lru_cache
def sandbox_of(
    url: str | None, memory_mb: int = 1024, max_concurrent: int | None = None, allow_unisolated: bool | None = None
) -> Sandbox:
    """The sandbox of these settings."""
    limits = Limits(memory_mb=memory_mb)
    if url is None:
        return LocalSandbox(limits, max_concurrent, allow_unisolated=allow_unisolated)
    return RemoteSandbox(url, limits, max_concurrent or 64)


def same_output(output: str, expected: str) -> bool:
    """Whether a program printed what is expected, but for whitespace and the rounding of fractions."""
    lines = [[line.split() for line in text.strip().splitlines()] for text in (output, expected)]
    if lines[0] == lines[1]:
        return True
    if [len(line) for line in lines[0]] != [len(line) for line in lines[1]]:
        return False
    return all(_same_token(*pair) for rows in zip(*lines, strict=True) for pair in zip(*rows, strict=True))


def same_value(result: Any, expected: Any) -> bool:
    """Whether a function returned what is expected; APPS has some results within a list."""
    if _equal(result, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _equal(result, expected[0])


def _run(
    sandbox: Sandbox, program: str, tests: Tests, number: int, seconds: float, memory_mb: int
) -> tuple[str, float]:
    """Run one test case; returns its fault and the seconds that it took."""
    expected, marked = tests.outputs[number], bool(tests.function or tests.asserts)
    mark = secrets.token_hex(16) if marked else None
    expression = expected.expression if isinstance(expected, AssertCase) else None
    names = f"FUNCTION, EXPRESSION, MARK, NO_PROGRAM = {tests.function!r}, {expression!r}, {mark!r}, {_NO_PROGRAM}"
    source = f"{program}\n{tests.asserts[number]}\n" if tests.asserts and expression is None else program
    longest = 256 + 4 * _size(tests.asserts[number] if tests.asserts else expected) // 1024
    limits = Limits(wall_s=seconds, cpu_s=math.ceil(seconds), memory_mb=memory_mb, output_kb=longest)
    files = {"solution.py": source.encode("utf-8", "replace")}
    runner = Program(f"{names}\n{ENCODER}{_RUNNER}", stdin=tests.inputs[number].encode("utf-8", "replace"), files=files)
    ended = sandbox.run(runner, limits)
    return _fault(ended, tests, number, mark), ended.seconds


def _fault(ended: Ended, tests: Tests, number: int, mark: str | None) -> str:
    expected = tests.outputs[number]
    if ended.ended:
        return ended.ended
    if ended.code:
        return "syntax" if ended.code == _NO_PROGRAM else "error"
    if mark is None:
        return "" if same_output(ended.output, expected) else "wrong"
    _, mark_read, result = ended.output.rpartition(f"\n{mark}")
    if not mark_read:  # it left before its end
        return "error"
    try:
        if tests.asserts:
            same = expected is None or expected.holds(decoded(_read_json(result)))
        else:
            same = same_value(_read_json(result), expected)
    except (ValueError, TypeError, RecursionError, MemoryError):  # what cannot be read is no answer
        return "error"
    return "" if same else "wrong"


def _items(value: Any) -> list[Any]:
    """A list; columns of files have arrays for it."""
    if value is None:
        return []
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _text(value: Any) -> str:
    """Input or output as text; APPS has some as lists of lines."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> str:
    """The arguments of a function as JSON, from a list of them, or from text with JSON on each line."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return _json(value)
    lines = [line for line in str(value).splitlines() if line.strip()]
    try:
        for line in lines:
            _read_json(line)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"the input {str(value)[:60]!r} of a function is no JSON in each line ({error})") from None
    return f"[{', '.join(lines)}]"


def _value(value: Any) -> Any:
    """The result of a function as JSON shows it; text that is JSON stands for its value."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, str):
        return _read_json(_json(value))
    with contextlib.suppress(ValueError, RecursionError):
        return _read_json(value)
    return value


_MOST_DIGITS = 4000  # Python refuses to read an integer with a few more at once


def _integer(text: str) -> int:
    """An integer of any length."""
    if len(text) <= _MOST_DIGITS:
        return int(text)
    if text.startswith("-"):
        return -_integer(text[1:])
    half = len(text) // 2
    return _integer(text[:-half]) * 10**half + _integer(text[-half:])


def _read_json(text: str) -> Any:
    """The value of JSON text, with integers of any length.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_int=_integer)


def _json(value: Any) -> str:
    """A value of a ground truth as JSON text.

    Raises:
        RewardError: it cannot be written as JSON.
    """
    try:
        return json.dumps(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise RewardError(
            f"a value of the ground truth cannot be written as JSON ({type(error).__name__}: {error}); give numbers, "
            "text, lists and objects; a value with integers of more than 4300 digits is given as text with its JSON"
        ) from None


def _size(expected: Any) -> int:
    """Bytes that an answer of this value may take, printed."""
    if isinstance(expected, str):
        return len(expected)
    try:
        return len(json.dumps(expected))
    except (ValueError, RecursionError):
        return _LARGE


def _equal(first: Any, second: Any) -> bool:
    """Whether two values of JSON are the same. Loops, because values may be nested deeply."""
    waiting = [(first, second)]
    while waiting:
        first, second = waiting.pop()
        if isinstance(first, list) and isinstance(second, list):
            if len(first) != len(second):
                return False
            waiting += zip(first, second, strict=True)
        elif isinstance(first, dict) and isinstance(second, dict):
            if first.keys() != second.keys():
                return False
            waiting += [(first[name], second[name]) for name in first]
        elif not _same_scalar(first, second):
            return False
    return True


def _same_scalar(first: Any, second: Any) -> bool:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (first, second))
    if isinstance(first, (list, dict)) or isinstance(second, (list, dict)):
        return False
    if first == second or not numbers:
        return bool(first == second)
    if not (isinstance(first, float) or isinstance(second, float)):
        return False
    try:
        return math.isclose(first, second, rel_tol=1e-5, abs_tol=1e-8) or (math.isnan(first) and math.isnan(second))
    except OverflowError:  # an integer beyond the range of fractions
        return False


def _same_token(token: str, expected: str) -> bool:
    if token == expected:
        return True
    if not any(mark in expected for mark in ".eE"):
        return False
    try:
        return math.isclose(float(token), float(expected), rel_tol=1e-5, abs_tol=1e-8)
    except ValueError:
        return False
