"""Programs as answers: formats of test cases, what counts as equal, what a program cannot do, sandboxes that fail."""

import json
import math
import secrets
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_tools import started_server

from hybridrl.reward import RewardError, RewardFunction, RewardPool, Sample, default_compute_score
from hybridrl.reward.score import SCORERS
from hybridrl.reward.score.asserts import split_assert
from hybridrl.reward.score.programs import compute_score, program_of, read_tests, same_output, same_value
from hybridrl.scored import Reason

SQUARES = {"inputs": ["2\n", "3", "-4"], "outputs": ["4", "9\n", "16"]}


def block(code: str, language: str = "python") -> str:
    return f"I would write:\n```{language}\n{code}\n```\nThat is all."


def test_standard_input_and_output() -> None:
    right = compute_score(block("print(int(input()) ** 2)"), json.dumps(SQUARES))
    assert right == {"score": 1.0, "acc": True, "tests": 3, "passed": 3, "fault": ""}
    part = compute_score(block("n = int(input())\nprint(n * n if n > 0 else 1 / 0)"), SQUARES)
    assert part["score"] == pytest.approx(2 / 3) and part["fault"] == "error" and not part["acc"]
    whole = compute_score(block("n = int(input())\nprint(n * n if n < 0 else 0)"), SQUARES, continuous=False)
    assert (whole["score"], whole["passed"], whole["fault"]) == (0.0, 0, "wrong")


def test_partial_credit_looks_at_ten_cases() -> None:
    tests = {"inputs": [str(n) for n in range(12)], "outputs": ["0"] * 6 + ["1"] * 6}
    found = compute_score(block("print(0)"), tests)
    assert (found["tests"], found["passed"], found["score"]) == (10, 6, 0.6)


def test_functions_of_three_kinds_of_data() -> None:
    method = block(
        "class Solution:\n    def add(self, a: List[int], b):\n        print('noise')\n        return sum(a) + b"
    )
    apps = {"fn_name": "add", "inputs": [[[1, 2], 3], [[1], 1]], "outputs": [[6], 2]}
    assert compute_score(method, apps)["score"] == 1.0
    lines = {"fn_name": "add", "inputs": ["[1, 2]\n3"], "outputs": ["6"]}
    assert compute_score(block("def add(a, b): return sum(a) + b"), lines)["score"] == 1.0
    arrays = {"fn_name": "add", "inputs": np.array([[1, 2]]), "outputs": np.array([3])}
    assert compute_score(block("add = lambda a, b: a + b"), arrays)["score"] == 1.0
    asserts = {"assert_case": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]}
    assert compute_score(block("def add(a, b): return a + b"), asserts)["score"] == 0.5


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("def f(:", "syntax"),
        ("x = '\0'", "syntax"),
        ("import time; time.sleep(60)", "time"),
        ("while True: print('x' * 10000)", "output"),
        ("import os; os._exit(0)", "wrong"),
        ("raise SystemExit(3)", "error"),
    ],
)
def test_what_became_of_the_first_failure(code, fault) -> None:
    found = compute_score(block(code), SQUARES, timeout=1.0, total_timeout=2.0)
    assert (found["score"], found["fault"]) == (0.0, fault)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit()",
        "import os\nos.write(1, b'3'); os._exit(0)",
        "class F:\n    def __eq__(self, other): return True\ndef add(a, b): return F()",
        "def add(*a): raise SystemExit(0)",
    ],
)
def test_a_program_that_leaves_early_or_equals_everything_passes_no_function_test(code) -> None:
    tests = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
    assert compute_score(block(code), tests)["score"] == 0.0


SEARCH = """
import glob, os
paths, seen = [], ''
for top in ('/tmp', os.getcwd()):
    for folder, below, files in os.walk(top):
        below[:] = [name for name in below if os.path.join(folder, name) not in PREFIXES]
        paths += [os.path.join(folder, name) for name in files if os.path.isfile(os.path.join(folder, name))]
for path in [*paths, *glob.glob('/proc/[0-9]*/cmdline'), *glob.glob('/proc/[0-9]*/environ')]:
    try:
        with open(path, errors='replace') as file:
            seen += file.read(2**20)
    except OSError:
        pass
print(next((word for word in (FIRST + SECOND, 'glob.' + 'glob') if word in seen), ''))
"""


def test_what_is_expected_is_not_in_the_sandbox() -> None:
    """The program looks for it in all files, arguments and environments; its own text, which is there, it finds."""
    secret = f"secret-{secrets.token_hex(8)}"
    code = SEARCH.replace("FIRST", repr(secret[:9])).replace("SECOND", repr(secret[9:]))
    code = code.replace("PREFIXES", repr((sys.prefix, sys.base_prefix)))
    assert compute_score(block(code), {"inputs": [""], "outputs": [secret]}, timeout=60.0)["score"] == 0.0
    assert compute_score(block(code), {"inputs": [""], "outputs": ["glob.glob"]}, timeout=60.0)["score"] == 1.0


def test_the_last_block_counts() -> None:
    assert program_of("```python\n1\n``` and ```python\n2\n```") == "2\n"
    assert program_of("```python\n1\n```\n```text\nout\n```") == "1\n"
    assert program_of("```\n1\n```") == "1\n" and program_of("```x = 1```") == "x = 1"
    assert program_of("print(1)") is None and program_of("```python\nprint(1)") is None
    assert compute_score("no code", SQUARES)["fault"] == "no program"


@pytest.mark.parametrize(
    "response",
    [
        "1. Square it:\n   ```python\n   n = 2\n   if n:\n       n = 4\n   ```\n2. Done.",
        "~~~python\nn = 2\nif n:\n    n = 4\n~~~",
        "````python\nn = 2\nif n:\n    n = 4\n````",
        '```python title="a.py"\nn = 2\nif n:\n    n = 4\n```',
        "```{python}\nn = 2\nif n:\n    n = 4\n```",
        "```python\r\nn = 2\r\nif n:\r\n    n = 4\r\n```",
        "```python\nn = 2\nif n:\n    n = 4\n```\n```python\n```",
    ],
)
def test_blocks_as_models_write_them(response: str) -> None:
    program = program_of(response)
    assert program is not None
    assert program.replace("\r", "") == "n = 2\nif n:\n    n = 4\n"


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1 2\n3\n\n", "1 2 \n3", True),
        ("0.3333333", "0.33333334", True),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("1 2 3", "1 2\n3", False),
        ("Yes", "YES", False),
        ("", "0", False),
        ("nan", "0.5", False),
    ],
)
def test_outputs_that_are_the_same(found, expected, same) -> None:
    assert same_output(found, expected) is same


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_values_equal_themselves_also_within_a_list(value) -> None:
    assert same_value(value, value) and same_value(value, [value])
    assert not same_value([value, value], value) or value == []


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(-1e-7, 1e-7))
def test_fractions_may_be_rounded(value, error) -> None:
    assert same_value(value * (1 + error), value) or not math.isfinite(value * (1 + error))


@pytest.mark.parametrize(
    ("truth", "word"),
    [
        ("{", "no JSON"),
        ("[1]", "list"),
        (None, "NoneType"),
        ({"inputs": [], "outputs": []}, "0 inputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"fn_name": "f", "inputs": ["x y"], "outputs": [1]}, "no JSON in each line"),
    ],
)
def test_test_cases_that_are_none_are_refused(truth, word) -> None:
    with pytest.raises(RewardError, match=word):
        read_tests(truth)


#: those that data sets have, and all others in the table; any source with the beginning of one that ends in *
SOURCES = {"apps", "taco", "codeforces", "codecontests", "code_contests"}
SOURCES |= {name.replace("*", "_any") for name, module in SCORERS.items() if module == "programs"}


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_the_data_sources_of_code(source) -> None:
    assert default_compute_score(source, block("print(int(input()) ** 2)"), json.dumps(SQUARES))["score"] == 1.0


def samples(*codes):
    return [Sample("apps", block(code), SQUARES, {}) for code in codes]


def test_in_reward_processes_time_in_the_sandbox_does_not_count() -> None:
    """Each call sleeps for longer than the limit of a call: the test cases' own limits hold."""
    function = RewardFunction(kwargs={"timeout": 20.0})
    with RewardPool(function, num_workers=2, timeout_s=1.0) as pool:
        code = "import time; time.sleep(0.5); print(int(input()) ** 2)"
        found = pool.run(samples(code, code, "print(1)"))
    assert [one.score for one in found] == [1.0, 1.0, 0.0] and not any(one.timed_out for one in found)
    assert min(one.seconds for one in found[:2]) > 1.0


def test_a_server_scores_and_one_that_fails_gives_unscored() -> None:
    with started_server() as url:
        settings = {"sandbox_fusion_url": url, "memory_limit_mb": 512}
        with RewardPool(RewardFunction(kwargs=settings), num_workers=1) as pool:
            assert [one.score for one in pool.run(samples("print(int(input()) ** 2)", "print(4)"))] == [1.0, 1 / 3]
    with RewardPool(RewardFunction(kwargs=settings), num_workers=1) as pool:
        (found,) = pool.run(samples("print(1)"))
    assert found.unscored.reason is Reason.INFRA and math.isnan(found.score)


@pytest.mark.parametrize(
    "code",
    [
        "def f(x):\n    for _ in range(DEEP): x = [x]\n    return x",
        "import os\ndef f(x): PRINTED('[' * DEEP + ']' * DEEP)",
        "import os\ndef f(x): PRINTED('{\"a\":' * DEEP + '1' + '}' * DEEP)",
        "def f(x): return 10 ** 20000",
        "def f(x): return -10 ** 400",
        "def f(x): return float('nan')",
        "def f(x): return [float('inf'), -float('inf')]",
        "def f(x): return '\\ud800'",
        "import os\ndef f(x): PRINTED('[1')",
        "import os\ndef f(x): PRINTED('')",
        "import os\ndef f(x): PRINTED('1e999999999')",
        "import os\ndef f(x): PRINTED('9' * 200000)",
        "import os\ndef f(x): PRINTED(b'\\xff\\xfe')",
        "def f(x):\n    a = []\n    a.append(a)\n    return a",
        "class A:\n    def __repr__(self): raise RuntimeError\n"
        "    __str__ = __eq__ = __iter__ = __reduce__ = __repr__\n"
        "def f(x): return A()",
        "class A(list):\n    def __iter__(self): raise KeyboardInterrupt\ndef f(x): return A([1])",
        "def f(x): return {(1, 2): 3}",
        "def f(x): return {1, 2}",
        "def f(x):\n    while True: yield 1",
        "def f(x): print('x' * 2**30)",
        "def f(x): return 'x' * 2**28",
    ],
)
@pytest.mark.parametrize("expected", [1.5, [1, [2]], {"a": {"a": 1}}, "text"], ids=str)
def test_what_cannot_be_read_is_a_wrong_answer(code, expected) -> None:
    """What comes from a model's program is data, whatever it is: the score is 0, with a reason."""
    if expected != 1.5 and ("2**" in code or "while" in code):
        return
    show = "(lambda text: (os.write(1, ('\\n' + open('main.py').read().split(chr(39))[3]).encode() + (text if "
    show += "isinstance(text, bytes) else text.encode())), os._exit(0)))"
    code = code.replace("PRINTED", show)
    for depth in (500, 2000, 60000) if "DEEP" in code else (0,):
        truth = {"fn_name": "f", "inputs": [[1]], "outputs": [expected]}
        found = compute_score(block(code.replace("DEEP", str(depth))), truth, timeout=5.0)
        assert found["score"] == 0.0 and found["fault"], (depth, found)


def test_right_answers_that_are_hard_to_read() -> None:
    """Nested as deeply as JSON can be, integers of more digits than Python reads, no number and no end."""
    deep = "[" * 300 + "1" + "]" * 300
    cases = [
        ("def f(x):\n    for _ in range(300): x = [x]\n    return x", deep),
        ("def f(x): return 10 ** 20000 + x", "1" + "0" * 19999 + "1"),
        ("def f(x): return float('nan')", "NaN"),
        ("def f(x): return [-float('inf')]", "[-Infinity]"),
        ("def f(x): return '\\ud800'", '"\\ud800"'),
    ]
    for code, expected in cases:
        truth = {"fn_name": "f", "inputs": ["1"], "outputs": [expected]}
        assert compute_score(block(code), truth)["score"] == 1.0, code
        assert compute_score(block("def f(x): return 2"), truth)["score"] == 0.0, code
    huge = {"fn_name": "f", "inputs": ["9" * 6000], "outputs": ["1" + "0" * 6000]}
    assert compute_score(block("def f(x): return x + 1"), json.dumps(huge))["score"] == 1.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
)


@given(JSON, JSON)
def test_comparing_values_never_raises_and_agrees_with_itself(one, other) -> None:
    assert same_value(one, one)
    assert same_value(one, other) in (True, False)
    assert same_value(10**400, other) == (other == 10**400)


def test_a_ground_truth_that_cannot_be_written_is_the_users() -> None:
    value = []
    for _ in range(5000):
        value = [value]
    for bad in (value, {1, 2}, 10**5000):
        with pytest.raises(RewardError, match="ground truth cannot be written as JSON"):
            read_tests({"fn_name": "f", "inputs": [[1]], "outputs": [bad]})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("np.int64(3)", 3),
        ("np.array([[1, 2]])", [[1, 2]]),
        ("[np.float32(0.5), np.bool_(True)]", [0.5, True]),
        ("{np.int64(1): [np.int64(2)]}", {"1": [2]}),
        ("decimal.Decimal('0.5')", 0.5),
        ("fractions.Fraction(6, 2)", 3),
        ("10**20 * decimal.Decimal(1)", 10**20),
    ],
)
def test_numbers_of_libraries_are_the_numbers_that_they_equal(value: str, expected: object) -> None:
    code = f"import decimal, fractions\nimport numpy as np\ndef f(x): return {value}"
    assert compute_score(block(code), {"fn_name": "f", "inputs": [[1]], "outputs": [expected]})["score"] == 1.0


@pytest.mark.parametrize(
    ("value", "statement"),
    [
        ("(1, 2)", "assert f(1) == (1, 2)"),
        ("[2, 1]", "assert set(f(1)) == set((1, 2)), 'sets'"),
        ("{'a': (1,), 2: {3}}", "assert f(1) == {'a': (1,), 2: {3}}"),
        ("10**6000", f"assert 1{'0' * 4000} * 10**2000 == f(1)"),
        ("collections.Counter('aab')", "assert {'a': 2, 'b': 1} == f(1)"),
        ("b'a'", "assert f(1) == b'a'"),
        ("1 + 2j", "assert f(1) == 1 + 2j"),
        ("None", "assert f(1) is None"),
        ("0.3000001", "assert math.isclose(f(1), 0.3, rel_tol=1e-3)"),
        ("3", "x = f(1)\nassert x == 3"),
        ("3", "assert f(1) == 2 or f(1) == 3"),
    ],
)
def test_asserts_hold_as_python_has_them(value: str, statement: str) -> None:
    truth = {"assert_case": [statement]}
    assert compute_score(block(f"def f(x): return {value}"), truth)["score"] == 1.0
    wrong = compute_score(block("def f(x): return [[1]]"), truth)
    assert wrong["score"] == 0.0 and wrong["fault"] in ("wrong", "error")


@pytest.mark.parametrize(
    "code",
    [
        "class Equal:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return Equal()",
        "import json\njson.dumps = lambda *a, **k: 'true'\ndef f(x): return [2]",
        "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): return 9",
        "import os\nmark = open('main.py').read().split(\"'\")[3]\nos.write(1, f'\\n{mark}null'.encode())\nos._exit(0)",
        "import sys\nsys.excepthook = lambda *_: None\nsys.exit = None\ndef f(x): return 9",
        "import builtins\nbuiltins.AssertionError = StopIteration\ndef f(x): return 9",
    ],
)
def test_a_program_that_equals_everything_or_reports_itself_passes_no_assert_of_a_literal(code: str) -> None:
    """Objects that equal everything passed, and so did a program that wrote the runner's mark itself."""
    found = compute_score(block(code), {"assert_case": ["assert f(1) == 2", "assert (3, 4) == f(1)"]})
    assert found["score"] == 0.0


#: programs that make checks of their own process pass, and whose answers are wrong
CHEATS = (
    "import builtins\nbuiltins.abs = builtins.len = lambda x: 0\nbuiltins.sorted = builtins.set = lambda x: EQUAL\n",
    "import builtins, math\nmath.isclose = builtins.isinstance = lambda *a, **k: True\n",
)
EQUAL = "class Equal(list):\n    def __eq__(self, other): return True\n"
EQUAL += "    __lt__ = __gt__ = __contains__ = __eq__\nEQUAL = Equal()\n"
#: asserts, an answer with which they hold, and one with which they do not
ASSERTS = [
    ("assert abs(f(1) - 2.5) < 1e-6", "2.5", "9.0"),
    ("assert math.isclose(f(1), 2.5)", "2.5", "9.0"),
    ("assert sorted(f(1)) == [1, 2]", "[2, 1]", "[3]"),
    ("assert set(f(1)) == set([1, 2])", "[2, 1]", "[3]"),
    ("assert len(f(1)) == 2", "[2, 1]", "[3]"),
    ("assert isinstance(f(1), int) and f(1) > 3", "4", "'a'"),
    ("assert f(1) in (1, 2), 'neither'", "2", "3"),
    ("assert 1 < f(1) < 3", "2", "EQUAL"),
    ("assert f(1) != 3", "2", "3"),
    ("assert not f(1)", "[]", "[1]"),
    ("assert f(1) is None", "None", "0"),
    ("assert f(1) is True", "True", "1"),
    ("assert f(1) == 10**9 + 7", "10**9 + 7", "EQUAL"),
    ("assert f(1) == 2 and f(2) == 2", "2", "EQUAL"),
    ("assert str(f(1)) == '2'", "2", "3"),
    ("assert f(1)[0] == 2", "[2]", "EQUAL"),
]


@pytest.mark.parametrize(("statement", "right", "wrong"), ASSERTS)
def test_what_an_assert_does_with_values_of_the_program_happens_elsewhere(statement, right, wrong) -> None:
    truth = {"assert_case": [statement]}
    assert compute_score(block(f"def f(x): return {right}"), truth)["score"] == 1.0
    for cheat in ("", *CHEATS):
        code = f"{EQUAL}{cheat}def f(x): return {wrong}"
        assert compute_score(block(code), truth)["score"] == 0.0, cheat


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("assert f(1) == f(2)", "def f(x): return 3"),
        ("assert all(f(i) == i for i in range(9))", "def f(x): return x"),
        (
            "assert f(2) == Point(2)",
            "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\nf = Point",
        ),
        ("x = f(1)\nassert x == 1", "def f(x): return x"),
        ("assert f(1) is None or f(1).a", "def f(x): return None"),
        ("assert f(2) * 2 == 4", "def f(x): return x"),
        ("assert f'{f(1)}' == '1'", "def f(x): return x"),
        ("assert Counter(f('aab')) == Counter('aba')", "from collections import Counter\ndef f(x): return x"),
    ],
)
def test_asserts_that_cannot_be_taken_apart_still_work(statement: str, code: str) -> None:
    assert compute_score(block(code), {"assert_case": [statement]})["score"] == 1.0


@pytest.mark.parametrize("text", ["10**10**9", "[0] * 10**10", "'a' * 10**10", "2 << 10**10", "range(10**12)"])
def test_what_takes_any_time_is_not_evaluated_here(text: str) -> None:
    assert split_assert(f"assert f(1) == {text}") is None
