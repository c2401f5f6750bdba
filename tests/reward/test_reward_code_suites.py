"""HumanEval and LiveCodeBench: which program a response is, without running it, and some programs that run."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from raising import raises_with

from hybridrl.reward import RewardError, RewardFunction, RewardPool, Sample, default_compute_score
from hybridrl.reward.score import check_ground_truth
from hybridrl.reward.score.function_checks import completed
from hybridrl.scored import Reason

PROMPT = (
    "from typing import List\n\n\ndef double(x):\n    return 2 * x\n\n\ndef add(values: List[int]) -> int:\n"
    '    """Add the doubles.\n    >>> add([1, 2])\n    6\n    """\n'
)
CHECK = "def check(candidate):\n    assert candidate([1, 2]) == 6\n    assert candidate([]) == 0\n"
TRUTH = json.dumps({"prompt": PROMPT, "test": CHECK, "entry_point": "add"})
WHOLE = "def add(values: List[int]) -> int:\n    return sum(double(value) for value in values)"
BODY = "    return sum(double(value) for value in values)"

#: texts around a code block C, which do not change the program
AROUND = (
    *(
        "```python\nC\n```",
        "Here it is:\n\n```python\nC\n```\n\nIt adds.",
        "```\nC\n```",
        "```py\nC\n```",
        "~~~python\nC\n~~~",
    ),
    *("<think>```python\nx = 1\n```</think>\n```python\nC\n```", "```python\nx = 1\n```\nBetter:\n```python\nC\n```"),
    *(
        "```python3\nC\n```",
        "````python\nC\n````",
        "```{python}\nC\n```",
        "```bash\npip install\n```\n```python\nC\n```",
    ),
)
#: programs that define the function or complete it, and others
RIGHT = (
    *(WHOLE, f"import math\n\n{WHOLE}", f"{WHOLE}\n\nprint(add([1]))", f"def helper():\n    pass\n\n\n{WHOLE}"),
    *(BODY, BODY.replace("    ", "", 1), "add = lambda values: sum(map(double, values))", f"# the whole\n{WHOLE}"),
    *("    total = 0\n    for value in values:\n        total += double(value)\n    return total", f"{PROMPT}{BODY}"),
    *("    return sum(values) * 2", "class add:\n    def __new__(cls, values):\n        return 2 * sum(values)"),
    *("def add(v):\n    return sum(v) + sum(v)", "async_value = 1\ndef add(values):\n    return sum(values + values)"),
)
WRONG = (
    *("def subtract(values):\n    return 0", "    return sum(values)", "def add(values):\n    return 6", "    pass"),
    *("def add(values):\n    return str(2 * sum(values))", "def add():\n    return 6", "x = 1", "    return None"),
    *("def add(values):\n    raise ValueError", "    return [6]", "def add(values):\n    return 6 if values else 1"),
    *("def add(values):\n    return 2 * sum(values) + 1", "    return double(sum(values)) if values else None"),
)
NOTHING = ("", "I cannot.", "```python\n", "return sum(values)", "```python\n```", "`add`", "def add(values) return 1")


def defined(program: str) -> object:
    """What the function of a program of this file gives, run here: they are all harmless."""
    names: dict[str, object] = {}
    try:
        exec(compile(program, "p", "exec"), names)
        add = names["add"]
        return callable(add) and add([1, 2]) == 6 and add([]) == 0
    except Exception:
        return False


def programs_of_humaneval() -> Iterator[tuple[str, bool]]:
    for around in AROUND:
        for code in (*RIGHT, *WRONG):
            yield around.replace("C", code), code in RIGHT


def test_the_program_of_a_response_is_that_of_its_last_block() -> None:
    made = list(programs_of_humaneval())
    assert len(made) + len(NOTHING) >= 300
    for response, right in made:
        program = completed(response, PROMPT, "add")
        assert program is not None and defined(program) is right, response
    for response in NOTHING:
        program = completed(response, PROMPT, "add")
        assert program is None or defined(program) is False, response
    assert defined(completed(WHOLE, PROMPT, "add") or "") is True, "a response that is Python without a block"


@pytest.mark.parametrize(
    ("response", "score", "fault"),
    [
        (f"```python\n{WHOLE}\n```", 1.0, ""),
        (f"```python\n{BODY}\n```", 1.0, ""),
        (WHOLE, 1.0, ""),
        (f"```python\n{PROMPT}{BODY}\n```", 1.0, ""),
        ("```python\ndef add(values):\n    return 6\n```", 0.0, "error"),
        ("```python\ndef add(values:\n```", 0.0, "syntax"),
        ("```python\nimport os\nos._exit(0)\n\ndef add(values):\n    return 6\n```", 0.0, "error"),
        ("```python\ndef add(values):\n    while True:\n        pass\n```", 0.0, "time"),
        ("```python\ndef check(f):\n    pass\n\ndef add(values):\n    return 1\n```", 0.0, "error"),
        ("no program", 0.0, "no program"),
    ],
)
def test_humaneval_runs_the_check(response: str, score: float, fault: str) -> None:
    result = default_compute_score("humaneval", response, TRUTH, timeout=2.0)
    assert result == {"score": score, "acc": score == 1.0, "fault": fault}


SQUARES = json.dumps({"inputs": [f"{n}\n" for n in range(12)], "outputs": [str(n * n) for n in range(12)]})
METHOD = json.dumps({"inputs": ["[1, 2]\n3", "[]\n0"], "outputs": ["6", "0"], "fn_name": "total"})


@pytest.mark.parametrize(
    ("code", "truth", "right"),
    [
        ("n = int(input())\nprint(n * n)", SQUARES, True),
        ("n = int(input())\nprint(n * n if n < 11 else 0)", SQUARES, False),  # the last of more than 10 cases counts
        ("n = int(input())\nprint(n)", SQUARES, False),
        ("class Solution:\n    def total(self, values, more):\n        return sum(values) + more", METHOD, True),
        ("class Solution:\n    def total(self, values, more):\n        return sum(values)", METHOD, False),
        ("def total(values, more):\n    return sum(values) + more", METHOD, True),
    ],
)
def test_livecodebench_asks_for_all_test_cases(code: str, truth: str, right: bool) -> None:
    result = default_compute_score("livecodebench", f"```python\n{code}\n```", truth)
    assert isinstance(result, dict) and result["acc"] is right and result["score"] == float(right)


@pytest.mark.parametrize("source", ["humaneval", "livecodebench"])
def test_a_sandbox_that_is_gone_gives_no_score(source: str) -> None:
    truth = {"humaneval": TRUTH, "livecodebench": SQUARES}[source]
    function = RewardFunction(None, None, {"sandbox_fusion_url": "http://127.0.0.1:9/run_code"})
    sample = Sample(source, f"```python\n{WHOLE}\n```", truth, {})
    with RewardPool(function, 1, 60.0) as pool:
        (outcome,) = pool.run([sample], str)
    assert outcome.unscored is not None and outcome.unscored.reason is Reason.INFRA


def test_truths_without_a_check_are_refused() -> None:
    with raises_with(RewardError, "humaneval", "entry_point"):
        check_ground_truth(json.dumps({"prompt": PROMPT, "test": CHECK}), "humaneval")
    with raises_with(RewardError, "livecodebench", "inputs"):
        check_ground_truth("{}", "livecodebench")
