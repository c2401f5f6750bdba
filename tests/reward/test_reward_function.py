"""Finding a reward function in a file, understanding its parameters, checking its result."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from raising import raises_with

from hybridrl.reward import RewardError
from hybridrl.reward.function import RewardFunction, load
from hybridrl.reward.results import BadScore, check_score, check_scores
from hybridrl.reward.signature import Sample, understand


def nested(levels: int) -> list:
    found: list = []
    for _ in range(levels):
        found = [found]
    return found


SAMPLES = [Sample("source", f"text {i}", f"truth {i}", {"i": i}) for i in range(3)]


def call_one(path, **settings):
    return load(RewardFunction(path, **settings))(SAMPLES[1])


@pytest.mark.parametrize(
    "source",
    [
        "def compute_score(data_source, solution_str, ground_truth, extra_info): {}",
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs): {}",
        "def compute_score(solution_str, ground_truth, extra_info, data_source): {}",
        "def anything(a, b, c, d, /):\n    data_source, solution_str, ground_truth, extra_info = a, b, c, d; {}",
        "def compute_score(**sample):\n    globals().update(sample); {}",
        "def compute_score(*, data_source, solution_str, ground_truth, extra_info): {}",
    ],
)
def test_ways_to_write_it_for_one_sample(user_file, source):
    path = user_file(source.format("return [data_source, solution_str, ground_truth, extra_info]"))
    assert call_one(path) == ["source", "text 1", "truth 1", {"i": 1}]


def test_a_function_may_take_less(user_file):
    assert (
        call_one(user_file("def f(solution_str, ground_truth): return solution_str + ground_truth")) == "text 1truth 1"
    )
    assert call_one(user_file("def f(a, b, c, /): return [a, b, c]", "b.py")) == ["source", "text 1", "truth 1"]


@pytest.mark.parametrize(
    "source",
    [
        "def compute_reward(responses, ground_truths): return list(zip(responses, ground_truths))",
        "def compute_reward(completions, answers): return list(zip(completions, answers))",
        "def f(ground_truths, responses, **kwargs): return list(zip(responses, ground_truths))",
        "def f(data_sources, solution_strs, ground_truths, extra_infos): return list(zip(solution_strs, "
        "ground_truths))",
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):\n"
        "    return list(zip(solution_strs, ground_truths))",
    ],
)
def test_ways_to_write_it_for_a_batch(user_file, source):
    loaded = load(RewardFunction(user_file(source)))
    assert loaded.form == "batch"
    assert loaded.batch(SAMPLES) == [(s.solution_str, s.ground_truth) for s in SAMPLES]


@pytest.mark.parametrize("name", ["predict_str", "model_output"])
def test_the_names_of_verls_own_scorers(user_file, name):
    path = user_file(f"def compute_score({name}: str, ground_truth: str) -> float: return [{name}, ground_truth]")
    assert call_one(path) == ["text 1", "truth 1"]


@pytest.mark.parametrize("form", ["sample", "batch"])
def test_a_column_of_trls_functions_may_be_called_solution(form):
    def accuracy_reward(completions, solution, **kwargs): ...

    call = understand(accuracy_reward, "accuracy_reward", {}, form, "source", "reward_kwargs")
    rows = [Sample("source", f"text {i}", None, {}, columns={"solution": f"truth {i}"}) for i in range(2)]
    values = call.values(rows)
    assert (values["completions"], values["solution"]) == (["text 0", "text 1"], ["truth 0", "truth 1"])


def test_the_manager_decides_where_names_do_not(user_file):
    path = user_file("def f(a, b, c, d, /): return b")
    assert load(RewardFunction(path, form="sample"))(SAMPLES[0]) == "text 0"
    batched = load(RewardFunction(path, form="batch"))
    assert batched.form == "batch" and batched.batch(SAMPLES) == ["text 0", "text 1", "text 2"]


def test_further_arguments(user_file):
    path = user_file("def f(solution_str, ground_truth, scale, shift=0): return (scale, shift)")
    assert call_one(path, kwargs={"scale": 2, "shift": 3}) == (2, 3)
    with raises_with(RewardError, "reward_kwargs", "'size'", "solution_str"):
        load(RewardFunction(path, kwargs={"scale": 1, "size": 2}))
    with raises_with(RewardError, "'scale'"):
        call_one(path)


def test_which_function_is_found_without_a_name(user_file):
    both = "def compute_reward(responses, ground_truths): ...\ndef compute_score(solution_str, ground_truth): return 7"
    assert call_one(user_file(both)) == 7
    only = "from os.path import join\ndef _help(): ...\nclass A: ...\ndef mine(solution_str, ground_truth): return 8"
    assert call_one(user_file(only, "only.py")) == 8
    with raises_with(RewardError, "not clear", "reward.custom_", "name"):
        load(RewardFunction(user_file("def one(a, b, c, d): ...\ndef two(a, b, c, d): ...", "two.py")))
    with pytest.raises(RewardError, match="Functions found there: none"):
        load(RewardFunction(user_file("x = 1", "none.py")))


def test_a_named_function(user_file):
    path = user_file("def one(a, b, c, d, /): return 1\ndef two(a, b, c, d, /): return 2")
    assert call_one(path, name="two") == 2
    with raises_with(RewardError, "name=three", "mine.py"):
        load(RewardFunction(path, name="three"))


def test_a_callable_object_and_a_module_by_name(user_file):
    source = "class Judge:\n    def __call__(self, solution_str, ground_truth): return 5\njudge = Judge()"
    assert call_one(user_file(source), name="judge") == 5
    loaded = load(RewardFunction("pkg://hybridrl.reward.score", name="default_compute_score"))
    assert loaded(Sample("hybridrl/sort", "#### 1", "1", {})) == 1.0


def test_async_is_recognised(user_file):
    assert load(RewardFunction(user_file("async def f(solution_str, ground_truth): return 1"))).is_async
    source = "class Judge:\n    async def __call__(self, solution_str, ground_truth): return 5\njudge = Judge()"
    assert load(RewardFunction(user_file(source, "b.py"), name="judge")).is_async


@pytest.mark.parametrize("parameters", ["", "a", "a, b", "a, b, c", "a, b, c, d", "a, b, c, d, e", "*args"])
def test_parameters_that_are_not_understood(user_file, parameters):
    with raises_with(RewardError, "mine.py", "compute_score"):
        load(RewardFunction(user_file(f"def f({parameters}): ...")))


def test_files_that_do_not_import(user_file, tmp_path):
    with raises_with(RewardError, "none.py"):
        load(RewardFunction(str(tmp_path / "none.py")))
    with pytest.raises(RewardError, match=r"SyntaxError(.|\n)*mine.py, line 2"):
        load(RewardFunction(user_file("x = 1\ndef broken(:\n")))
    with raises_with(RewardError, "ModuleNotFoundError", "'not_there'", "b.py", "line 3"):
        load(RewardFunction(user_file("\n\nimport not_there", "b.py")))
    with pytest.raises(RewardError, match=r"must end in .py"):
        load(RewardFunction(user_file("x = 1", "mine.txt")))


def test_files_beside_it_can_be_imported(user_file):
    user_file("VALUE = 11", "beside_the_reward.py")
    path = user_file("from beside_the_reward import VALUE\ndef f(solution_str, ground_truth): return VALUE")
    assert call_one(path) == 11


@pytest.mark.parametrize(
    "value", [1, 1.0, True, np.float32(1), np.int64(1), np.longdouble(1), torch.tensor(1.0), np.array([1.0])]
)
def test_what_is_a_score(value):
    assert check_score(value) == (1.0, None)
    assert check_score({"score": value})[0] == 1.0


def test_a_dict_is_made_plain():
    raw = {"score": np.float64(0.5), "acc": np.bool_(True), "parts": (1, np.arange(2)), "note": "x", "none": None}
    score, extra = check_score(raw)
    assert (score, extra) == (0.5, {"score": 0.5, "acc": True, "parts": [1, [0, 1]], "note": "x", "none": None})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "returned nan; a score must be finite"),
        (-math.inf, "returned -inf"),
        (torch.tensor(float("nan")), "returned nan"),
        (None, "returned NoneType"),
        ("1.0", "returned str '1.0'"),
        ([1.0], "returned list"),
        (np.arange(2), "ndarray"),
        (np.ma.masked, "masked"),
        (np.ma.array([[3.0]], mask=True), "masked"),
        ({"score": np.ma.array(3.0, mask=True)}, "masked"),
        (np.timedelta64(5, "ns"), "timedelta64"),
        ({}, "without 'score'"),
        ({"reward": 1}, "without 'score' .keys: reward"),
        ({"score": math.nan}, "returned nan"),
        ({"score": 1, "what": object()}, "returned object under 'what'"),
        ({"score": 1, "what": np.array([object()])}, "returned object under 'what'"),
        ({"score": 1, "what": 1j}, "returned complex under 'what'"),
        ({"score": 1, "what": b"x"}, "returned bytes under 'what'"),
        ({"score": 1, "what": 10**5000}, "integer of 16610 bits under 'what'"),
        ({"score": 1, "what": nested(1000)}, "nested more than 50 levels deep under 'what'"),
        ({"score": 1, 1: "a", "1": "b"}, "two keys in the dict that are '1'"),
        ({"score": 1, "what": {None: 1, "None": 2}}, "two keys in 'what' that are 'None'"),
    ],
)
def test_what_is_no_score(value, message):
    with pytest.raises(BadScore, match=message):
        check_score(value)


def test_scores_of_a_batch():
    assert check_scores([1, {"score": 2, "k": 3}], 2) == [(1.0, None), (2.0, {"score": 2.0, "k": 3})]
    assert check_scores(torch.tensor([1.0, 2.0]), 2) == [(1.0, None), (2.0, None)]
    for value, message in [
        ([1], "returned 1 scores for 2 responses"),
        (3.0, "returned float instead of a list of 2 scores"),
        ("ab", "returned str"),
    ]:
        with pytest.raises(BadScore, match=message):
            check_scores(value, 2)
    good, bad = check_scores([1, math.nan], 2)
    assert good == (1.0, None) and "nan" in str(bad) and "response 1 of 2" in str(bad)
