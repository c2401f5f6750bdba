"""HumanEval: a function that completes a prompt, run with the program that checks it, in a sandbox.

The ground truth is `{"prompt", "test", "entry_point"}`, as JSON: the beginning of a program, a function `check(f)` that
raises if f is wrong, and the name of the function. 1 if the check ends without an error, else 0.
"""

import ast
import json
import textwrap
import warnings
from collections.abc import Mapping
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.reward.score import programs
from hybridrl.reward.score.programs import Tests

#: tries whether programs run
check_machine = programs.check_machine
_KEYS = ("prompt", "test", "entry_point")


def read_truth(ground_truth: Any) -> dict[str, str]:
    """Return the parts of a ground truth.

    Raises:
        RewardError: it has not all of them.
    """
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except ValueError:
        truth = None
    if not isinstance(truth, Mapping) or not all(isinstance(truth.get(name), str) for name in _KEYS):
        raise RewardError(f"the ground truth is {str(ground_truth)[:60]!r}; it must have {', '.join(_KEYS)}, as JSON")
    return {name: truth[name] for name in _KEYS}


#: what checks a ground truth before a run
check_ground_truth = read_truth


def completed(solution_str: str, prompt: str, entry_point: str) -> str | None:
    """Return the program of a response, after the prompt's own imports and functions; None where there is none.

    The last code block defines the function, or goes on where the prompt ends. A response without a code block counts
    if it is Python that defines the function.
    """
    block = programs.program_of(solution_str)
    if block is None:
        return f"{prompt}\n\n{solution_str}" if _defines(solution_str, entry_point) else None
    if _defines(block, entry_point):
        return f"{prompt}\n\n{block}"
    if not _parses(prompt + block) and _parses(indented := prompt + textwrap.indent(block, "    ")):
        return indented
    return prompt + block


def _parses(text: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(text, "solution.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _defines(text: str, name: str) -> bool:
    """Whether a program has a function or a variable of this name at its top."""
    if not _parses(text):
        return f"def {name}(" in text  # a faulty program is run all the same, and reported as such
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            return True
    return False


def compute_score(solution_str: str, ground_truth: Any, timeout: float = 10.0, **sandbox: Any) -> dict[str, Any]:
    """Score one response.

    Args:
        solution_str: the response.
        ground_truth: see the module.
        timeout: seconds for the whole check.
        sandbox: see `programs.compute_score`.

    Returns:
        `score` (1.0 or 0.0), `acc`, and `fault` as `programs.compute_score` gives it.

    Raises:
        SandboxError: the sandbox failed, so there is no score.
        RewardError: the ground truth is none.
    """
    truth = read_truth(ground_truth)
    program = completed(solution_str, truth["prompt"], truth["entry_point"])
    if program is None:
        return {"score": 0.0, "acc": False, "fault": "no program"}
    statement = f"{truth['test']}\n\ncheck({truth['entry_point']})"
    tests = Tests(("",), (None,), None, (statement,))
    result = programs.score_program(program, tests, continuous=False, timeout=timeout, **sandbox)
    return {name: result[name] for name in ("score", "acc", "fault")}
